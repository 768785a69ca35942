"""A cache of verified remote files, which all processes of a machine share."""
