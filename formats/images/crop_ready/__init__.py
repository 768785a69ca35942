"""JPEGs of which a crop is decoded without the rest."""
