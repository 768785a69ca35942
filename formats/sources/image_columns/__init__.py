"""Columns that lie beside images: tables of metadata, paired folders and COCO's annotations."""
