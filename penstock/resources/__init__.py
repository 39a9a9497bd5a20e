"""Resource types of `penstock.dev/v1alpha1`: schema, validation, defaults and status, as pydantic models."""
