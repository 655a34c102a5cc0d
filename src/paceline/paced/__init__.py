"""Groups that take a given time per pass: the control plane at the speed of hardware that is not here.

Processes, messages, trees and planning are the real ones. Only the forward passes are replaced: by a recorded
trace of what a target chose and what a drafter proposed, or by a small real model, and a wait for the rest of
the time the pass is said to take.
"""
