"""Rules of fields, in Python and in CEL, and the texts that many fields have."""
