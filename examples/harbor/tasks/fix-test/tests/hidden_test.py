from total import total

assert total([]) == 0
assert total([5]) == 5
assert total([1, 2, 3, -4]) == 2
