"""SageMaker's /invocations."""
