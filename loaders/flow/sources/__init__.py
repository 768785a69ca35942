"""Where a flow's items come from."""
