"""What can go wrong while an image is built."""


class ImageError(Exception):
    """What is wrong with building or reading an image, where, and what to do next."""


class ToolMissing(ImageError):
    """A program that builds images is not on this machine."""
