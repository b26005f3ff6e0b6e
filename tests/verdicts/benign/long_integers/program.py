print(len(str(7**9000)))
