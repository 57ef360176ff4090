"""From a checked call to a launch: what kernel it needs, its plan, and calls that were bound before."""
