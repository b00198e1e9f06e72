"""From a model to its ONNX file: the hook, both exporters of torch, and what makes their result a file of ours."""
