feet = 2
miles = 3
pounds = 5
ounces = 7


def convert(value, unit):
    return (value * (unit + 11) + 37 * unit) % 90 + 10
