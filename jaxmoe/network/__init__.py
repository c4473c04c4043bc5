"""Experts over several hosts: what travels between them, around a layer that each host computes for itself.

Ranks of one host reach each other's memory, and any implementation runs among them. Between hosts tokens and answers
travel by XLA's collectives, each rank with those of the same place on the other hosts.

    levels     which ranks are of one host, and which have the same place
    plan       what may be chosen; `choice` chooses where the user does not, with the reason
    roll_call  names hosts that others wait for
    gather     every token to every host: a gather, and a sum over hosts
    send       a token to the hosts that have one of its experts, in rounds of bounded size
    layer      chunks of tokens, each by one of the two ways
    cost       bytes and time, for the choice, for `explain` and for docs/scaling.md
"""
