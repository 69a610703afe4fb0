"""What has nothing to do with attention: device questions, launches, operators, argument checks."""
