"""What a record has beside key, label and image: its schema, and values as bytes."""
