"""TFRecord files of tf.train.Example, read without TensorFlow."""
