"""What can go wrong while an image is built."""


class ImageError(Exception):
    """An image cannot be built or read: the cause, the path and the remedy."""


class ToolMissing(ImageError):
    """A program that builds images is not on this machine."""
