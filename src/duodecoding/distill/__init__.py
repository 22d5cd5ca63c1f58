"""Making a draft for a target: the target's own answers as data, some of its layers as a start, its distribution as the label."""
