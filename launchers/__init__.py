"""Starting the processes of a run; imports only `gppo_megatron.config` and `gppo_megatron.errors`."""
