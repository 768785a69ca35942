"""From a source to TensorFlow's queues and staging areas."""
