print('nonsense')
