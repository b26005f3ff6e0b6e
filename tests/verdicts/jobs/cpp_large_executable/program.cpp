char data[20 << 20] = {1};
int main() { return data[5]; }
