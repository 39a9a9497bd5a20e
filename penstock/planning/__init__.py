"""What plans of hardware are made from: prices, published figures of other machines, and the plans of Inferentia. Pure.

`penstock_planner` compares hardware with them; `penstock_operator` takes the arithmetic of cost.
"""
