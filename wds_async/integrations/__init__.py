"""Classes for other frameworks, in a module for each that imports the framework."""
