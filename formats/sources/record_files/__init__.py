"""Files that hold many records each, as other libraries write them."""
