"""Where metrics go: files, the console, TensorBoard, pictures."""
