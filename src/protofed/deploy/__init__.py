"""A federation across real machines, on Flower: the same local training and the same server.

- ``setup`` makes a federation's folders, with ``certificates`` and ``templating``
- ``members``: ``federation.toml``, the sites and the rules of a round
- ``admission``: how sites' keys are admitted and revoked; ``installed``: methods of your own
- ``operator`` starts and stops runs; ``run_log``: what a run tells the operator
- ``programs`` runs Flower's programs for the server, a site and the operator
- ``gate``, ``superlink``: the part of the server that the network reaches; ``supernode``: a site
- ``executor`` runs the tasks of server and sites, with installed code only
- ``doctor`` checks a deployment from inside and outside
- ``server_app``, ``coordinator``: the rounds as the server runs them
- ``client_app``, ``site``: a round as a site runs it
- ``policy``, ``audit``: what a site allows, and what it writes down
- ``spec``, ``messages``, ``wire``: what travels (a run, a message, its tensors)
- ``checks``: what a reply must look like before it counts

Only this package imports ``flwr``, which comes with the extra ``flower``.
"""
