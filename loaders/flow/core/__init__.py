"""What every step of a flow is made of."""
