"""What is wrong with this model, this training run?

``watch`` looks on while the reader's own loop trains (chapter 5); ``checkup`` tries the parts
before training (chapter 8). Both collect evidence, then rules read it.
"""
