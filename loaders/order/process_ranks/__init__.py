"""The rank of this process among those that train together."""
