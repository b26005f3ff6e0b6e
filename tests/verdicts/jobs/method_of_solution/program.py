class Solution:
    def f(self, numbers: List[int]) -> List[int]:
        return tuple(sorted(numbers))
