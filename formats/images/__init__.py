"""Kinds of image files, their properties, their decoding, and crops cut from coded JPEGs."""
