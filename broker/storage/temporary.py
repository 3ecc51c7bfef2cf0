"""What files in the making are called, so that nobody takes them for what they will be."""

TEMPORARY = ".tmp-"
