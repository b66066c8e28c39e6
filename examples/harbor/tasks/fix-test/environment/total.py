def total(numbers):
    result = 1
    for number in numbers:
        result += number
    return result
