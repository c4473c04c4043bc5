"""How errors name what they were given. Callers: everything that checks arguments."""


def a_type(value: object) -> str:
    """Returns the type of a value with its article: `a list`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
