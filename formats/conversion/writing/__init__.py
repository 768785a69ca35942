"""Any items as a dataset: written from a sequence, a generator or a flow."""
