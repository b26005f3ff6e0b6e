int main() { volatile int *p = nullptr; return *p; }
