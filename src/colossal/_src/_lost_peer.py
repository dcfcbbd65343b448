"""How the error of a rank reads that failed only since a peer did; it is not the reason of a job's failure."""

import re

__all__ = ["LOST_PEER"]

LOST_PEER = re.compile(
    r"Connection (closed|reset) by (peer|remote)|Broken pipe|remote (process|worker)|Timed out waiting|"
    r"recvValue|failed to recv|Connection refused|DistNetworkError|DistStoreError|Watchdog caught collective|"
    r"CommunicationError: .*(has ended|has left|did not come|must come to its collectives)|"
    r"LaunchError: (Rank \d+ must reach|All \d+ processes must)",
)
