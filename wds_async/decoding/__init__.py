"""Image, video and pickle decoders behind `autodecode`."""
