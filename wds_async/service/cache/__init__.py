"""The disk cache of the service: chunks of objects, kept by a policy, checked when read."""
