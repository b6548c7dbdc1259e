"""What the multi-rank tests are made of; imported by the tests and, in every rank's process, by the calls they send.

```text
rank_processes, rank   processes that run a call on every rank and never outlive a test run
toy_scheduler          requests, block tables, prefix hits, preemptions: the steps
schedules              the steps of each scenario, and random ones
toy_model              layers whose output depends on every byte of the history
toy_decode             its decode rows at each layer's owner
rank_caches            the same model on one rank of a KVPP group, and on a rank that keeps every layer
toy_group              what the ranks of a group share: memory, pipes, a process group
setups                 how blocks are moved: every mode and transport, and what goes round it
transports             what uses every freedom of a transport's contract
exchanges              what is put round an exchange, and what loses something there
broken_transports      what loses something
scenarios, pipeline, lost_ranks, made_groups   the calls
```
"""
