"""A site whose ranks may die and come back while it trains (torchft inside one site).

`ElasticSite` is the `Site` whose members are asked anew for every step. torchft gives who they are
(lighthouse, quorum) and a process group that can be formed again; all the rest is here:

    quorum    asks the lighthouse, through torchft's manager, who is there
    meeting   how those who are there agree on one state: a pure decision
    host      the meeting place, and the member's other answers: ping, alarm, state
    newcomer  a rank without state waits for those who have one, and begins nothing beside them
    wire      frames and tensors over a socket, with digests
    group     collectives that notice a lost member
    site      ElasticSite: the life of one member

docs/torchft.md tells the story, and why torchft is used for this and for nothing else.
"""
