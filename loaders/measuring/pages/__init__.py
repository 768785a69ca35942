"""What a run of a loader or a flow has counted, as pictures."""
