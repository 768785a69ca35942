"""COCO's files of instances: images with boxes, categories and segmentations."""
