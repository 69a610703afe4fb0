"""Parts that do not know attention: device questions, launches, operators, argument checks."""
