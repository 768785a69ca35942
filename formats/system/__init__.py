"""Files and descriptors, and the base of objects that own one."""
