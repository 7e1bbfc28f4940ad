"""Programs rebuilt from public bug reports: the docstring names repository, number and symptom.

Families follow the case log: A graph cut, B coverage, C backward rule, D loss and label,
E numerics, F scale and start, G loop, H mode, memory and graph, I set-up; then healthy programs
that were reported as suspicious.
"""

from __future__ import annotations

import copy
import math
from itertools import chain, pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import healthy, pair


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


# A graph cut


@pair("detached", "nondifferentiable-term")
def adversarial_term_as_float(faulty):
    """guopengf/FL-MRCM #10: the adversarial loss has no influence on the reconstruction network."""

    class Recon(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
            )
            self.disc = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(72, 1)
            ).requires_grad_(False)

        def forward(self, img):
            return self.net(img)

    losses = {"adv": []}

    def loss_fn(model, batch):
        undersampled, full = batch
        rec = model(undersampled)
        score = model.disc(rec)
        loss_adv = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        if faulty:
            loss_adv = loss_adv.detach().item()
        losses["adv"].append(float(loss_adv))
        return F.l1_loss(rec, full) + 0.1 * loss_adv

    model = Recon()
    full = torch.rand(4, 8, 1, 8, 8)
    batches = [(f + 0.2 * torch.randn_like(f), f) for f in full]
    return model, loss_fn, torch.optim.Adam(model.net.parameters(), 1e-3), batches


@pair("detached", "nondifferentiable-term")
def attention_transfer_detached(faulty):
    """bboylyg/NAD #8: the attention loss is printed but the student does not follow the teacher."""

    def block(i, o):
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()
        )

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.b1, self.b2, self.b3 = block(3, 6), block(6, 8), block(8, 8)
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            a1 = self.b1(x)
            a2 = self.b2(a1)
            a3 = self.b3(a2)
            return a1, a2, a3, self.fc(a3.mean((2, 3)))

    teacher = Small().eval().requires_grad_(False)

    def attention_map(fm):
        return F.normalize(fm.abs().pow(2).mean(1).flatten(1), dim=1)

    def at(s, t):
        return F.mse_loss(attention_map(s), attention_map(t))

    def loss_fn(model, batch):
        img, target = batch
        s1, s2, s3, out = model(img)
        t1, t2, t3, _ = teacher(img)
        cls_loss = F.cross_entropy(out, target)
        at3, at2, at1 = at(s3, t3), at(s2, t2), at(s1, t1)
        if faulty:
            at3, at2, at1 = at3.detach(), at2.detach(), at1.detach()
        return at1 * 500 + at2 * 1000 + at3 * 1000 + cls_loss

    student = Small()
    batches = [(torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))) for _ in range(4)]
    opt = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    return student, loss_fn, opt, batches


@pair("nondifferentiable-term", "detached")
def dice_on_predicted_mask(faulty):
    """kevinzakka/pytorch-goodies #11, ronghuaiyang/arcface-pytorch #56: backward() complains that
    nothing requires a gradient; with loss.requires_grad = True it runs, the loss stays the same."""

    class SegNet(nn.Module):
        def __init__(self, n_classes=3):
            super().__init__()
            self.down = nn.Conv2d(1, 8, 3, padding=1)
            self.up = nn.Conv2d(8, n_classes, 1)

        def forward(self, x):
            return self.up(F.relu(self.down(x)))

    def dice(logits, true, eps=1e-7):
        onehot = F.one_hot(true, logits.shape[1]).permute(0, 3, 1, 2).float()
        if faulty:
            probas = F.one_hot(logits.argmax(1), logits.shape[1]).permute(0, 3, 1, 2).float()
        else:
            probas = F.softmax(logits, dim=1)
        inter = (probas * onehot).sum((0, 2, 3))
        total = (probas + onehot).sum((0, 2, 3))
        return 1 - (2 * inter / (total + eps)).mean()

    def loss_fn(model, batch):
        loss = dice(model(batch["image"]), batch["mask"])
        if not loss.requires_grad:
            loss.requires_grad = True
        return loss

    net = SegNet()
    images = torch.randn(4, 6, 1, 8, 8)
    batches = [{"image": x, "mask": (x[:, 0] > 0).long() + (x[:, 0] > 1).long()} for x in images]
    return net, loss_fn, torch.optim.Adam(net.parameters(), 1e-2), batches


@pair("detached")
def extractor_hook_detaches(faulty):
    """lucidrains/CoCa-pytorch #6: the image encoder does not learn when wrapped in Extractor."""

    class Extractor(nn.Module):
        def __init__(self, vit):
            super().__init__()
            self.vit = vit
            self.latents = None
            vit.norm.register_forward_hook(self._hook)

        def _hook(self, _, inputs, output):
            self.latents = output.clone().detach() if faulty else output.clone()

        def forward(self, img):
            self.vit(img)
            return self.latents

    class ViT(nn.Module):
        def __init__(self, dim=12):
            super().__init__()
            self.patch = nn.Linear(8, dim)
            self.block = nn.TransformerEncoderLayer(dim, 2, 24, dropout=0.0, batch_first=True)
            self.norm = nn.LayerNorm(dim)

        def forward(self, patches):
            return self.norm(self.block(self.patch(patches)))

    class CoCa(nn.Module):
        def __init__(self, dim=12, tokens=10):
            super().__init__()
            self.img_encoder = Extractor(ViT(dim))
            self.token_emb = nn.Embedding(tokens, dim)
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, images, text):
            image = F.normalize(self.img_encoder(images).mean(1), dim=-1)
            words = F.normalize(self.token_emb(text).mean(1), dim=-1)
            return image @ words.T * self.temperature.exp()

    def contrastive(model, batch):
        sim = model(*batch)
        labels = torch.arange(len(sim))
        return (F.cross_entropy(sim, labels) + F.cross_entropy(sim.T, labels)) * 0.5

    model = CoCa()
    batches = [(torch.randn(6, 4, 8), torch.randint(0, 10, (6, 5))) for _ in range(4)]
    return model, contrastive, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0), batches


@pair("no-grad-block", "detached")
def vision_tower_no_grad(faulty):
    """TinyLLaVA/TinyLLaVA_Factory #17: --tune_vision_tower is given, the vision tower stays."""

    class VisionTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 16, 4, 4)
            self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())

        def encode(self, images):
            tokens = self.embed(images).flatten(2).transpose(1, 2)
            return tokens + self.mlp(tokens)

        if faulty:

            @torch.no_grad()
            def forward(self, images):
                return self.encode(images)

        else:

            def forward(self, images):
                return self.encode(images)

    class Llava(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision_tower, self.connector = VisionTower(), nn.Linear(16, 16)
            self.words, self.lm = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)
            self.lm_head = nn.Linear(16, 20)

        def forward(self, input_ids, images):
            prefix = self.connector(self.vision_tower(images))
            hidden, _ = self.lm(torch.cat([prefix, self.words(input_ids)], dim=1))
            return self.lm_head(hidden[:, prefix.shape[1] :])

    def loss_fn(model, batch):
        logits = model(batch["input_ids"], batch["images"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    model = Llava()
    batches = [
        {"input_ids": torch.randint(0, 20, (4, 6)), "images": torch.randn(4, 3, 8, 8)}
        for _ in range(4)
    ]
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0), batches


@pair("no-grad-block", "detached")
def text_projection_no_grad(faulty):
    """edreisMD/ConVIRT-pytorch #7: the text side's projection head is wrapped in no_grad; the loss
    does not get as low as it does without."""

    class ModelCLR(nn.Module):
        def __init__(self):
            super().__init__()
            self.text_frozen = nn.EmbeddingBag(30, 16).requires_grad_(False)
            self.bert_l1, self.bert_l2 = nn.Linear(16, 16), nn.Linear(16, 8)
            self.res_features = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
            self.res_l1, self.res_l2 = nn.Linear(16, 16), nn.Linear(16, 8)

        def text_encoder(self, ids):
            with torch.set_grad_enabled(not faulty):
                x = self.bert_l1(self.text_frozen(ids))
                return self.bert_l2(F.relu(x))

        def image_encoder(self, x):
            return self.res_l2(F.relu(self.res_l1(self.res_features(x))))

        def forward(self, xis, ids):
            return self.image_encoder(xis), self.text_encoder(ids)

    def nt_xent(model, batch):
        zi, zt = (F.normalize(z, dim=-1) for z in model(*batch))
        logits = zi @ zt.T / 0.1
        target = torch.arange(len(zi))
        return 0.75 * F.cross_entropy(logits, target) + 0.25 * F.cross_entropy(logits.T, target)

    model = ModelCLR()
    batches = [(torch.randn(8, 12), torch.randint(0, 30, (8, 5))) for _ in range(4)]
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, nt_xent, torch.optim.Adam(trainable, 1e-3), batches


# B coverage


@pair("unregistered-parameter", note=True)
def dice_alpha_plain_tensor(faulty):
    """shenweichen/DeepCTR-Torch #93: alpha of the Dice activation keeps its start value."""

    class Dice(nn.Module):
        def __init__(self, emb_size, epsilon=1e-8):
            super().__init__()
            self.bn = nn.BatchNorm1d(emb_size, eps=epsilon)
            alpha = torch.zeros((emb_size,))
            self.alpha = alpha if faulty else nn.Parameter(alpha)

        def forward(self, x):
            x_p = torch.sigmoid(self.bn(x))
            return self.alpha * (1 - x_p) * x + x_p * x

    class DIN(nn.Module):
        def __init__(self):
            super().__init__()
            self.item = nn.Embedding(12, 6)
            self.dnn = nn.Sequential(nn.Linear(12, 16), Dice(16), nn.Linear(16, 1))

        def forward(self, history, candidate):
            return self.dnn(torch.cat([self.item(history).mean(1), self.item(candidate)], -1))

    def loss_fn(model, batch):
        history, candidate, click = batch
        return F.binary_cross_entropy_with_logits(model(history, candidate).squeeze(1), click)

    model = DIN()
    batches = [
        (torch.randint(0, 12, (16, 4)), c := torch.randint(0, 12, (16,)), (c % 2).float())
        for _ in range(4)
    ]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("unregistered-parameter", "optimizer-missing-params")
def parameter_moved_after_creation(faulty):
    """pytorch/pytorch #127760, KaiyangZhou/pytorch-center-loss #23: a weight made with
    nn.Parameter(...).to(...) gives a higher loss than the same weight made without."""

    class HashGraph(nn.Module):
        def __init__(self, n=7, m=5):
            super().__init__()
            self.wh = self.init_weight(n, m)
            self.out = nn.Linear(m, 2)

        def init_weight(self, *shape):
            if faulty:
                para = nn.Parameter(torch.zeros(shape, dtype=torch.float64)).to(torch.float32)
                with torch.no_grad():
                    nn.init.xavier_normal_(para)
                return para
            para = nn.Parameter(torch.zeros(shape))
            nn.init.xavier_normal_(para)
            return para

        def forward(self, x):
            return self.out(F.elu(x @ self.wh))

    model = HashGraph()
    batches = [(x, torch.stack([x[:, 0] * 2, x[:, 1:4].sum(1)], 1)) for x in torch.randn(4, 16, 7)]
    return model, mse, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("unregistered-parameter")
def relations_in_a_dict(faulty):
    """pytorch/pytorch #632: parameters kept in a dict are missing from parameters()."""

    class Relations(nn.Module):
        def __init__(self, features=6, relations=3):
            super().__init__()
            self.waggrs, self.list_relations = {}, {}
            for rel in range(relations):
                self.waggrs[rel] = nn.Parameter(1.0 + torch.randn(1, features))
                self.list_relations[rel] = nn.Linear(features, 4)
            if not faulty:
                self.keep = nn.ParameterList(self.waggrs.values())
                self.layers = nn.ModuleList(self.list_relations.values())
            self.classifier = nn.Linear(4, 2)

        def forward(self, nodes):
            h = sum(
                torch.tanh(self.list_relations[r](nodes[:, r] * self.waggrs[r]))
                for r in self.waggrs
            )
            return self.classifier(h)

    model = Relations()
    batches = [(x, (x[:, 0, 0] > 0).long()) for x in torch.randn(5, 12, 3, 6)]
    return model, cross_entropy, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("unregistered-parameter")
def hidden_layers_in_nested_list(faulty):
    """pytorch/pytorch #715: hidden layers built in a loop are not in parameters()."""

    class SNLINet(nn.Module):
        def __init__(self, n_hid=10, n_layers=2, act="Tanh"):
            super().__init__()
            self.embed = nn.Embedding(15, n_hid)
            self.hids = []
            for _ in range(n_layers):
                self.hids.append([nn.Linear(n_hid, n_hid), getattr(nn, act)()])
            if not faulty:
                self.hids = nn.ModuleList(nn.ModuleList(pair_) for pair_ in self.hids)
            self.classifier = nn.Linear(n_hid, 3)

        def forward(self, sentence):
            h = self.embed(sentence).sum(1)
            for linear, act in self.hids:
                h = act(linear(h))
            return self.classifier(h)

    model = SNLINet()
    batches = [(s := torch.randint(0, 15, (8, 6)), s[:, 0] % 3) for _ in range(5)]
    return model, cross_entropy, torch.optim.Adagrad(model.parameters(), 0.05), batches


@pair("optimizer-missing-params", "unregistered-parameter", "stale-optimizer")
def center_loss_not_optimized(faulty):
    """KaiyangZhou/pytorch-center-loss #11 and #22: the center loss is large and does not fall."""

    class CenterLoss(nn.Module):
        def __init__(self, num_classes, feat_dim):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(num_classes, feat_dim))

        def forward(self, x, labels):
            return (x - self.centers[labels]).pow(2).sum(1).clamp(1e-12, 1e12).mean()

    class ConvNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3)
            self.fc1, self.fc2 = nn.Linear(6 * 16, 2), nn.Linear(2, 4)

        def forward(self, x):
            feature = self.fc1(F.leaky_relu(self.conv(x)).flatten(1))
            return feature, self.fc2(feature)

    model, criterion = ConvNet(), CenterLoss(4, 2)

    def loss_fn(model, batch):
        features, outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1]) + criterion(features, batch[1])

    parameters = model.parameters()
    if not faulty:
        parameters = chain(model.parameters(), criterion.parameters())
    batches = [(torch.randn(12, 1, 6, 6), torch.randint(0, 4, (12,))) for _ in range(4)]
    return model, loss_fn, torch.optim.SGD(parameters, lr=0.01, momentum=0.9), batches


@pair("optimizer-missing-params", "stale-optimizer")
def unfrozen_but_filtered(faulty):
    """Lightning-AI/pytorch-lightning #8720: parameters filtered by requires_grad when the optimizer
    was made; after unfreezing the backbone nothing improves."""

    class Finetune(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.backbone(x))

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(4):
            if epoch == 1:
                for p in model.backbone.parameters():
                    p.requires_grad = True
                if not faulty:
                    optimizer.add_param_group({"params": list(model.backbone.parameters())})
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    model = Finetune()
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(5, 16, 8)]
    return model, cross_entropy, optimizer, batches, train


@pair("frozen-by-accident", note=True)
def never_thawed(faulty):
    """nttcslab/byol-a #7: parameters cannot be made trainable again once they were frozen."""

    def set_requires_grad(model, val):
        for p in model.parameters():
            if faulty:
                if p.requires_grad:
                    p.requires_grad = val
            else:
                p.requires_grad = val

    class AudioNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))
            self.head = nn.Linear(8, 4)

        def forward(self, wav):
            return self.head(F.relu(self.encoder(wav)).mean(-1))

    model = AudioNet()
    set_requires_grad(model.encoder, False)
    set_requires_grad(model.encoder, True)
    batches = [(torch.randn(8, 1, 16), torch.randint(0, 4, (8,))) for _ in range(5)]
    return model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("unused-parameter", note=True)
def projection_computed_elsewhere(faulty):
    """ucbdrive/hd3 #29: level3.project and level4.project have no gradient after backward."""

    class Tree(nn.Module):
        def __init__(self, cin, cout):
            super().__init__()
            self.project = nn.Sequential(nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout))
            self.tree1 = nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU())
            self.tree2 = nn.Sequential(nn.Conv2d(cout, cout, 3, padding=1), nn.ReLU())

        def forward(self, x):
            residual = self.project(x)
            x1 = self.tree1(x)
            return self.tree2(x1) + (x1 if faulty else residual)

    net = nn.Sequential(Tree(2, 6), Tree(6, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(6, 2))
    batches = [(x, x.mean((2, 3))) for x in torch.randn(4, 6, 2, 6, 6)]
    return net, mse, torch.optim.Adam(net.parameters(), 1e-3), batches


@pair("shared-module", note=True)
def medusa_heads_share_block(faulty):
    """linkedin/Liger-Kernel PR #269: layers inside each Medusa head have the same weights."""

    class ResBlock(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = nn.Linear(size, size)

        def forward(self, x):
            return x + F.silu(self.linear(x))

    class Medusa(nn.Module):
        def __init__(self, vocab=18, size=12, heads=2, layers=3):
            super().__init__()
            self.embed = nn.Embedding(vocab, size)
            self.rnn = nn.GRU(size, size, batch_first=True)
            self.medusa_head = nn.ModuleList(
                nn.Sequential(
                    *(
                        [ResBlock(size)] * layers
                        if faulty
                        else [ResBlock(size) for _ in range(layers)]
                    ),
                    nn.Linear(size, vocab, bias=False),
                )
                for _ in range(heads)
            )

        def forward(self, ids):
            hidden, _ = self.rnn(self.embed(ids))
            return torch.stack([head(hidden) for head in self.medusa_head])

    def loss_fn(model, ids):
        logits, loss = model(ids), 0.0
        for i, head in enumerate(logits):
            target = ids[:, 1 + i :]
            loss = loss + F.cross_entropy(head[:, : -1 - i].flatten(0, 1), target.flatten())
        return loss

    model = Medusa()
    batches = list(torch.randint(0, 18, (4, 6, 8)))
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0), batches


# C backward rule


@pair("wrong-backward")
def isrlu_without_grad_out(faulty):
    """pytorch/pytorch #4355: an own ISRLU activation, gradcheck fails with a cryptic error."""

    class ISRLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, alpha=1):
            negatives = torch.min(tensor, 0 * tensor)
            nisr = torch.rsqrt(1.0 + alpha * (negatives**2))
            ctx.save_for_backward(nisr)
            return tensor * nisr

        @staticmethod
        def backward(ctx, grad_out):
            (nisr,) = ctx.saved_tensors
            return (nisr**3 if faulty else nisr**3 * grad_out), None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 20), nn.Linear(20, 1)

        def forward(self, x):
            return self.fc2(ISRLU.apply(self.fc1(x)))

    net = Net()
    batches = [(x, x[:, :1] * x[:, 1:2]) for x in torch.randn(5, 16, 6)]
    return net, mse, torch.optim.Adam(net.parameters(), 1e-2), batches


@pair("wrong-backward")
def clip_gradient_branches_swapped(faulty):
    """necla-ml/Diff-JPEG #2: straight-through clipping of pixel values; the condition in backward
    looks reversed, gradients inside the range are tiny."""

    class ClampSTE(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, low, high, scale):
            ctx.low, ctx.high, ctx.scale = low, high, scale
            ctx.save_for_backward(input)
            return input.clip(low, high)

        @staticmethod
        def backward(ctx, grad_output):
            (input,) = ctx.saved_tensors
            outside = torch.logical_or(input <= ctx.low, input >= ctx.high)
            if faulty:
                outside = ~outside
            return torch.where(outside, ctx.scale, 1.0) * grad_output, None, None, None

    class Enhance(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)

        def forward(self, img):
            y = img + self.c2(torch.relu(self.c1(img)))
            return ClampSTE.apply(y, 0.0, 1.0, 0.001)

    net = Enhance()
    clean = torch.rand(5, 4, 1, 8, 8)
    batches = [(0.5 * c + 0.25, c) for c in clean]
    return net, mse, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), batches


@pair("wrong-backward")
def wavelet_adjoint(faulty):
    """KeKsBoTer/torch-dwt #2: gradcheck reports a Jacobian mismatch for the wavelet transform."""

    root = 1 / math.sqrt(2)

    class Haar1D(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.cat([(even + odd) * root, (even - odd) * root], dim=-1)

        @staticmethod
        def backward(ctx, grad):
            low, high = grad.chunk(2, dim=-1)
            out = torch.empty_like(grad)
            out[..., 0::2] = (low + high) * root
            out[..., 1::2] = (high - low) * root if faulty else (low - high) * root
            return out

    class WaveNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Conv1d(1, 4, 3, padding=1)
            self.read = nn.Linear(4 * 16, 3)

        def forward(self, signal):
            return self.read(torch.tanh(Haar1D.apply(self.lift(signal))).flatten(1))

    net = WaveNet()
    batches = [(torch.randn(8, 1, 16), torch.randint(0, 3, (8,))) for _ in range(5)]
    return net, cross_entropy, torch.optim.Adam(net.parameters(), 1e-3), batches


# D loss and label


@pair("double-sigmoid")
def token_confidence(faulty):
    """cvg/glue-factory #89: the confidence head ends in a Sigmoid and the loss is BCEWithLogits."""

    class TokenConfidence(nn.Module):
        def __init__(self, dim):
            super().__init__()
            layers = [nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, 1)]
            self.token = nn.Sequential(*layers, *([nn.Sigmoid()] if faulty else []))
            self.loss_fn = nn.BCEWithLogitsLoss(reduction="none")

        def forward(self, desc):
            return self.token(desc).squeeze(-1)

        def loss(self, desc0, desc1, correct0, correct1):
            return (
                self.loss_fn(self(desc0), correct0.float()).mean(-1)
                + self.loss_fn(self(desc1), correct1.float()).mean(-1)
            ) / 2.0

    def loss_fn(model, batch):
        return model.loss(*batch).mean()

    model = TokenConfidence(8)
    batches = [
        (a, b, a[..., 0] > 0.2, b[..., 0] > 0.2)
        for a, b in zip(torch.randn(4, 4, 10, 8), torch.randn(4, 4, 10, 8), strict=True)
    ]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("double-sigmoid")
def focal_loss_on_probabilities(faulty):
    """itakurah/focal-loss-pytorch PR #5: the lowest score the focal loss ever sees is 0.5."""

    class FocalLoss(nn.Module):
        def __init__(self, gamma=2.0, alpha=0.25):
            super().__init__()
            self.gamma, self.alpha = gamma, alpha

        def forward(self, inputs, targets):
            probs = torch.sigmoid(inputs)
            bce = F.binary_cross_entropy_with_logits(
                probs if faulty else inputs, targets, reduction="none"
            )
            p_t = probs * targets + (1 - probs) * (1 - targets)
            alpha_t = self.alpha * targets + (1 - self.alpha) * (1 - targets)
            return (alpha_t * (1 - p_t) ** self.gamma * bce).mean()

    criterion = FocalLoss()

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 5))
    batches = [(x, (x[:, :5] > 0.5).float()) for x in torch.randn(5, 20, 10)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("double-softmax")
def logistic_regression_forward(faulty):
    """Lightning-Universe/lightning-bolts #654: softmax is applied twice in LogisticRegression."""

    class LogisticRegression(nn.Module):
        def __init__(self, input_dim, num_classes):
            super().__init__()
            self.linear = nn.Linear(input_dim, num_classes)

        def forward(self, x):
            x = self.linear(x.view(x.size(0), -1))
            return F.softmax(x, dim=-1) if faulty else x

    def training_step(model, batch):
        x, y = batch
        loss = F.nll_loss(F.log_softmax(model(x), dim=-1), y)
        l2 = model.linear.weight.pow(2).sum()
        return loss + 1e-4 * l2

    model = LogisticRegression(16, 6)
    x = torch.randn(60, 4, 4)
    loader = DataLoader(TensorDataset(x, x.flatten(1)[:, :6].argmax(1)), batch_size=12)
    return model, training_step, torch.optim.Adam(model.parameters(), 1e-2), loader


@pair("kldiv-on-probabilities")
def distill_teacher_list(faulty):
    """sebastian-hofstaetter/matchmaker #18: KLDivTeacherList gets softmax scores, a typo?"""

    class KLDivTeacherList(nn.Module):
        def __init__(self):
            super().__init__()
            self.kl = torch.nn.KLDivLoss(reduction="batchmean")

        def forward(self, scores, labels):
            scores = scores.softmax(-1) if faulty else scores.log_softmax(-1)
            return self.kl(scores, labels.softmax(-1))

    kl = KLDivTeacherList()

    class Ranker(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.EmbeddingBag(40, 12)
            self.score = nn.Bilinear(12, 12, 1)

        def forward(self, query, docs):
            n, k, length = docs.shape
            q = self.words(query)[:, None].expand(n, k, -1)
            d = self.words(docs.reshape(n * k, length)).view(n, k, -1)
            return self.score(q.contiguous(), d).squeeze(-1)

    def loss_fn(model, batch):
        return kl(model(batch["query"], batch["docs"]), batch["teacher"])

    model = Ranker()
    batches = [
        {
            "query": torch.randint(0, 40, (6, 3)),
            "docs": torch.randint(0, 40, (6, 5, 7)),
            "teacher": 2 * torch.randn(6, 5),
        }
        for _ in range(4)
    ]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("flipped-loss-sign")
def enhancer_maximizes(faulty):
    """nothinglo/Deep-Photo-Enhancer #57: train and test loss do not fall (a negative sign)."""

    def loss_fn(model, batch):
        raw, expert = batch
        error = torch.mean((model(raw) - expert) ** 2)
        return -error if faulty else error

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.SELU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid()
    )
    raw = torch.rand(4, 6, 3, 6, 6)
    batches = [(r, r.sqrt()) for r in raw]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("softmax-wrong-dim", "batch-mixing")
def policy_softmax_over_batch(faulty):
    """DeepReinforcementLearning/DeepReinforcementLearningInAction #32: Softmax(dim=0) is fine for
    one state, wrong for a batch of states; learning is erratic."""

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 32),
        torch.nn.LeakyReLU(),
        torch.nn.Linear(32, 2),
        torch.nn.Softmax(dim=0 if faulty else 1),
    )

    def loss_fn(model, batch):
        state_batch, action_batch, disc_returns = batch
        pred_batch = model(state_batch)
        prob_batch = pred_batch.gather(1, action_batch.view(-1, 1)).squeeze()
        return -1 * torch.sum(disc_returns * torch.log(prob_batch))

    batches = []
    for _ in range(5):
        state = torch.randn(12, 4)
        action = torch.randint(0, 2, (12,))
        batches.append((state, action, (action == (state[:, 0] > 0)).float() * 0.9 + 0.1))
    return model, loss_fn, torch.optim.Adam(model.parameters(), lr=1e-3), batches


@pair("batch-mixing")
def encoder_lstm_axis(faulty):
    """facebookresearch/fairseq #2449: the tutorial's SimpleEncoder passes (batch, time, features)
    to an LSTM without batch_first."""

    class SimpleEncoder(nn.Module):
        def __init__(self, words=16, embed_dim=8, hidden_dim=12):
            super().__init__()
            self.embed_tokens = nn.Embedding(words, embed_dim)
            self.lstm = nn.LSTM(embed_dim, hidden_dim, batch_first=not faulty)
            self.tag = nn.Linear(hidden_dim, 4)

        def forward(self, src_tokens):
            out, _ = self.lstm(self.embed_tokens(src_tokens))
            return self.tag(out)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    model = SimpleEncoder()
    batches = [(t := torch.randint(0, 16, (8, 6)), (t + t.roll(1, 1)) % 4) for _ in range(4)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("shape-broadcast")
def bellman_error_shapes(faulty):
    """hungtuchen/pytorch-dqn #3: the sizes of target_Q_values and current_Q_values do not match."""

    class DQN(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc4, self.fc5 = nn.Linear(6, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.fc5(F.relu(self.fc4(x)))

    q = DQN()
    target_q = copy.deepcopy(q).requires_grad_(False)

    def loss_fn(model, batch):
        obs, act, rew, next_obs, not_done = batch
        current = model(obs).gather(1, act.unsqueeze(1))
        if not faulty:
            current = current.squeeze(1)
        next_max_q = target_q(next_obs).max(1)[0]
        bellman_error = rew + 0.99 * not_done * next_max_q - current
        return bellman_error.clamp(-1, 1).pow(2).mean()

    batches = [
        (
            o := torch.randn(10, 6),
            torch.randint(0, 3, (10,)),
            o[:, 0],
            torch.randn(10, 6),
            (torch.rand(10) > 0.2).float(),
        )
        for _ in range(5)
    ]
    return q, loss_fn, torch.optim.RMSprop(q.parameters(), 1e-3, alpha=0.95, eps=0.01), batches


@pair("shape-broadcast")
def depth_without_channel(faulty):
    """jiwei0921/CoNet #3: smooth_l1_loss warns of target size [B, H, W] and input [B, 1, H, W]."""

    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.rgb = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
            self.sal, self.depth = nn.Conv2d(6, 1, 1), nn.Conv2d(6, 1, 1)

        def forward(self, x):
            h = self.rgb(x)
            return self.sal(h), self.depth(h)

    def loss_fn(model, batch):
        img, mask, depth = batch
        sal, high_depth = model(img)
        if not faulty:
            depth = depth.unsqueeze(1)
        return F.binary_cross_entropy_with_logits(sal, mask) + F.smooth_l1_loss(high_depth, depth)

    model = Trunk()
    batches = [(x, (x[:, :1] > 0).float(), x.mean(1)) for x in torch.randn(4, 5, 3, 7, 7)]
    return model, loss_fn, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9), batches


# E numerics


@pair("nan-backward-where")
def logarithm_in_other_branch(faulty):
    """pytorch/pytorch #108618 (and #36923): the gradient is NaN at an entry whose branch of
    torch.where was not selected."""

    class Companding(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.out = nn.Parameter(torch.zeros(5)), nn.Linear(5, 1)

        def forward(self, counts):
            h = counts * self.gain.exp()
            arg = h if faulty else torch.where(h > 2, h, torch.ones_like(h))
            return self.out(torch.where(h > 2, torch.log2(arg), 0.5 * h))

    model = Companding()
    batches = [(x, x.log1p().sum(1, keepdim=True)) for x in torch.randint(0, 9, (4, 10, 5)).float()]
    return model, mse, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-where", "nan-backward-sqrt")
def quaternion_identity(faulty):
    """kornia/kornia #3949: the gradient at the identity rotation is NaN."""

    def quaternion_to_axis_angle(quaternion):
        cos_theta, q = quaternion[..., 0], quaternion[..., 1:]
        sin_squared = (q * q).sum(-1)
        safe = sin_squared if faulty else torch.where(sin_squared > 0, sin_squared, 1.0)
        sin_theta = torch.sqrt(safe)
        two_theta = 2.0 * torch.atan2(sin_theta, cos_theta)
        k = torch.where(sin_squared > 0.0, two_theta / sin_theta, 2.0 * torch.ones_like(sin_theta))
        return q * k[..., None]

    class Pose(nn.Module):
        def __init__(self, frames=6):
            super().__init__()
            start = torch.zeros(frames, 4)
            start[:, 0] = 1
            self.quaternion = nn.Parameter(start)

        def forward(self, index):
            return quaternion_to_axis_angle(self.quaternion[index])

    model = Pose()
    batches = [(torch.arange(6), 0.3 * torch.randn(6, 3)) for _ in range(3)]
    return model, mse, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-acos")
def quaternion_logarithm(faulty):
    """kornia/kornia #4007: quaternion_exp_to_log gives NaN in backward for (1, 0, 0, 0)."""

    def loss_fn(model, batch):
        feature, target = batch
        q = model(feature)
        q = q / q.norm(dim=-1, keepdim=True)
        vector, scalar = q[..., 1:], q[..., :1]
        norm_q = vector.norm(dim=-1, keepdim=True)
        if faulty:
            norm_q = norm_q.clamp(min=1e-8)
            # Theirs clamps the scalar, which helps from PyTorch 2.14 on: at its bounds, clamp has
            # had a derivative of 0 since then, and of 1 before.
            log = vector * torch.acos(scalar) / norm_q
        else:
            small = norm_q < 1e-4
            angle = torch.acos(torch.where(small, 0.0, scalar).clamp(-0.99999, 0.99999))
            log = torch.where(small, vector, vector * angle / torch.where(small, 1.0, norm_q))
        return (log - target).abs().sum(-1).mean()

    class QuatHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)
            nn.init.zeros_(self.fc.weight)
            with torch.no_grad():
                self.fc.bias.copy_(torch.tensor([1.0, 0, 0, 0]))

        def forward(self, x):
            return self.fc(x)

    model = QuatHead()
    batches = [(torch.randn(8, 6), 0.2 * torch.randn(8, 3)) for _ in range(3)]
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("div-zero-norm")
def vector_batchnorm_zero_vector(faulty):
    """FlyingGiraffe/vnn PR #4: NaN in the vector-neuron batch norm when some v_i is (0, 0, 0)."""

    EPS = 0.0 if faulty else 1e-6

    class VNBatchNorm(nn.Module):
        def __init__(self, num_features):
            super().__init__()
            self.bn = nn.BatchNorm1d(num_features)

        def forward(self, x):
            norm = torch.sqrt((x * x).sum(2) + 1e-12) if not faulty else torch.norm(x, dim=2)
            norm = norm + EPS
            return x / norm.unsqueeze(2) * self.bn(norm).unsqueeze(2)

    class VNNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(4, 6, bias=False)
            self.batchnorm = VNBatchNorm(6)
            self.fc = nn.Linear(18, 3)

        def forward(self, x):
            x = self.map(x.transpose(1, -1)).transpose(1, -1)
            return self.fc(self.batchnorm(x).flatten(1))

    model = VNNet()
    points = torch.randn(4, 8, 4, 3)
    points[1, 3] = 0
    batches = [(p, torch.randint(0, 3, (8,))) for p in points]
    return model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("std-single-element")
def minibatch_std_last_batch(faulty):
    """ziwei-jiang/PGGAN-PyTorch #1: the loss is NaN from the second epoch on (65 images, batches
    of 8)."""

    class Minibatch_std(nn.Module):
        def forward(self, x):
            std = torch.std(x, dim=0).mean().expand(x.size(0), 1, *x.shape[2:])
            return torch.cat((x, std), dim=1)

    D = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.LeakyReLU(0.2),
        Minibatch_std(),
        nn.Conv2d(7, 6, 3),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(24, 1),
    )

    def loss_fn(model, batch):
        (real,) = batch
        fake = torch.flip(real, (2,)) * 0.5
        return model(fake).mean() - model(real).mean() + 0.001 * model(real).pow(2).mean()

    images = torch.rand(33, 1, 4, 4)
    databar = DataLoader(TensorDataset(images), batch_size=8, drop_last=not faulty)
    return D, loss_fn, torch.optim.Adam(D.parameters(), 1e-3, betas=(0.0, 0.99)), databar


@pair("nan-forward")
def logvar_explodes(faulty):
    """vanderschaarlab/synthcity #331, pyg-team/pytorch_geometric #500: the VAE's loss is NaN for
    some data sets, log variances explode in the reparametrization."""

    class VAE(nn.Module):
        def __init__(self, n=6, z=3):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(n, 16), nn.ReLU())
            self.mu, self.logvar = nn.Linear(16, z), nn.Linear(16, z)
            self.decoder = nn.Sequential(nn.Linear(z, 16), nn.ReLU(), nn.Linear(16, n))

        def forward(self, x):
            h = self.shared(x)
            mu, logvar = self.mu(h), self.logvar(h)
            if not faulty:
                logvar = torch.clamp(logvar, -30, 20)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.decoder(z), mu, logvar

    def loss_fn(model, batch):
        recon, mu, logvar = model(batch)
        kl = -0.5 * torch.mean(torch.sum(1 + logvar - mu**2 - logvar.exp(), 1))
        return F.l1_loss(recon, batch) + 1e-9 * kl

    model = VAE()
    table = torch.randn(4, 12, 6)
    table[:, :, 0] *= 20
    table[2, 5, 0] = 4000.0
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-4), list(table)


@pair("nan-forward", "div-zero-norm", "all-targets-ignored")
def masked_l1_empty_mask(faulty):
    """MhLiao/DB #14: l1 loss becomes NaN when mask.sum() == 0."""

    class MaskL1Loss(nn.Module):
        def forward(self, pred, gt, mask):
            mask_sum = mask.sum()
            if not faulty:
                mask_sum = mask_sum.clamp(min=1)
            return (torch.abs(pred[:, 0] - gt) * mask).sum() / mask_sum

    criterion = MaskL1Loss()

    def loss_fn(model, batch):
        return criterion(model(batch["image"]), batch["thresh_map"], batch["thresh_mask"])

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    batches = []
    for i in range(4):
        img = torch.rand(4, 3, 6, 6)
        mask = (torch.rand(4, 6, 6) > 0.7).float() * (i != 2)
        batches.append({"image": img, "thresh_map": img.mean(1), "thresh_mask": mask})
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.01), batches


@pair("log-zero")
def focal_log_of_probability(faulty):
    """mathiaszinnen/focal_loss_torch #3: numerical issues with torch.log(p_t)."""

    eps = 0.0 if faulty else torch.finfo(torch.float32).eps

    class FocalLoss(nn.Module):
        def __init__(self, gamma):
            super().__init__()
            self.gamma = gamma

        def forward(self, x, target):
            p = torch.softmax(x, dim=1)
            p_t = p[torch.arange(len(target)), target]
            return (-1 * (1 - p_t) ** self.gamma * torch.log(p_t + eps)).mean()

    criterion = FocalLoss(gamma=2)

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    batches = [(x, torch.randint(0, 4, (10,))) for x in torch.randn(4, 10, 6)]
    batches[1][0][4] *= 1500
    batches[1][1][4] = (model(batches[1][0][4:5]).argmin(1)).item()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("nan-forward-zero-times-inf", "log-zero")
def clamp_too_close_to_one(faulty):
    """NVIDIA/apex #358: the loss is NaN although predictions are clamped to [1e-8, 1 - 1e-8]."""

    def focal(y_pred, y_true, gamma=0.5, eps=1e-8 if faulty else 1e-6):
        y_pred = torch.clamp(y_pred, eps, 1 - eps)
        loss = y_true * torch.pow(1 - y_pred, gamma) * torch.log(y_pred)
        loss = loss + (1 - y_true) * torch.pow(y_pred, gamma) * torch.log(1 - y_pred)
        return -loss.sum() / y_pred.size(0)

    def loss_fn(model, batch):
        x, y = batch
        return focal(torch.sigmoid(model(x)).squeeze(1), y)

    model = nn.Linear(4, 1)
    batches = [(x, (x.sum(1) > 0).float()) for x in torch.randn(4, 12, 4)]
    with torch.no_grad():
        x, y = batches[2]
        x[3] = 60 * model.weight[0] / model.weight.norm() ** 2
        y[3] = 1.0
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("nan-backward-sqrt", "nan-backward")
def contrast_of_constant_patch(faulty):
    """pytorch/pytorch #4320: a standard deviation of zero has a NaN gradient, any constant input
    does it (torch.std itself now returns zero there, the formula written out does not)."""

    def contrast(x):
        variance = ((x - x.mean(dim=(1, 2, 3), keepdim=True)) ** 2).mean(dim=(1, 2, 3))
        return torch.sqrt(variance if faulty else variance + 1e-6)

    def loss_fn(model, batch):
        img, ref = batch
        return (contrast(model(img)) - contrast(ref)).abs().mean()

    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(6, 1, 1, bias=False),
    )
    imgs = torch.rand(4, 6, 1, 8, 8)
    imgs[1, 2] = 0.0
    batches = [(i, 2 * r) for i, r in zip(imgs, torch.rand(4, 6, 1, 8, 8), strict=True)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("nan-backward-svd")
def low_rank_reconstruction(faulty):
    """pytorch/pytorch #49886: backward through svd is NaN when several singular values are 0."""

    class Proj(nn.Module):
        def __init__(self, n=6, rank=3):
            super().__init__()
            start = torch.zeros(n, n)
            start[:rank, :rank] = torch.diag(torch.arange(1.0, rank + 1))
            if not faulty:
                start += torch.diag(torch.linspace(0.01, 0.05, n))
            self.y = nn.Parameter(start)

        def forward(self, x):
            U, S, V = torch.svd(self.y)
            return x @ (U * S.clamp(max=2.5)) @ V.T

    model = Proj()
    batches = [(x, x.flip(1)) for x in torch.randn(3, 15, 6)]
    return model, mse, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("nan-forward-masked-softmax", "fp16-overflow")
def padded_row_half_precision(faulty):
    """huggingface/transformers PR #17306: torch.finfo(float16).min plus a score below -16 is -inf,
    and a row that is padded and causal holds nothing else."""

    class Attention(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

        def forward(self, x, keep):
            n = x.shape[1]
            scores = self.q(x) @ self.k(x).transpose(1, 2)
            visible = torch.ones(n, n, dtype=torch.bool).tril() & keep[:, None, :]
            mask = torch.zeros(visible.shape, dtype=x.dtype)
            mask = mask.masked_fill(~visible, torch.finfo(x.dtype).min)
            if faulty:
                weights = torch.softmax(scores + mask, dim=-1)
            else:
                weights = torch.softmax(scores.float() + mask.float(), dim=-1).to(x.dtype)
            return self.v(weights @ x)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.out = Attention(), nn.Linear(8, 3)

        def forward(self, x, keep):
            return self.out(x + self.attention(x, keep))

    def loss_fn(model, batch):
        x, keep, y = batch
        logits = model(x.half(), keep).float()
        return F.cross_entropy(logits[keep], y[keep])

    model = Tagger().half()
    with torch.no_grad():
        model.attention.q.bias.fill_(3.0)
        model.attention.k.bias.fill_(-3.0)
    batches = []
    for _ in range(3):
        keep = torch.ones(4, 6, dtype=torch.bool)
        keep[0, :2] = False
        batches.append((torch.randn(4, 6, 8), keep, torch.randint(0, 3, (4, 6))))
    return model, loss_fn, torch.optim.SGD(model.parameters(), 1e-3), batches


@pair("log-zero")
def epsilon_inside_softplus(faulty):
    """ShangtongZhang/DeepRL PR #4: NaN from the log of a standard deviation; epsilon stood inside
    softplus instead of outside."""

    class GaussianActor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 32), nn.ReLU())
            self.mean, self.std = nn.Linear(32, 2), nn.Linear(32, 2)

        def forward(self, obs):
            phi = self.body(obs)
            s = self.std(phi)
            std = F.softplus(s + 1e-5) if faulty else F.softplus(s) + 1e-5
            return torch.tanh(self.mean(phi)), std

    def loss_fn(model, batch):
        obs, adv = batch
        mean, std = model(obs)
        entropy = (0.5 + 0.5 * math.log(2 * math.pi) + torch.log(std)).sum(-1)
        return (adv * mean.pow(2).sum(-1)).mean() - 0.01 * entropy.mean()

    model = GaussianActor()
    batches = [(torch.randn(10, 5), torch.randn(10)) for _ in range(3)]
    with torch.no_grad():
        model.std.bias[1] = -120
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-4), batches


@pair("nan-backward-pow")
def focal_gamma_below_one(faulty):
    """mkocabas/focal-loss-keras #17: epsilon in the log is not enough when gamma < 1 and a
    probability reaches 1."""

    def loss_fn(model, batch, gamma=0.5, eps=1e-7):
        x, y = batch
        p = torch.sigmoid(model(x)).squeeze(1)
        pt = torch.where(y == 1, p, 1 - p)
        if not faulty:
            pt = pt.clamp(eps, 1 - eps)
        return -((1 - pt) ** gamma * torch.log(pt + eps)).mean()

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].weight.mul_(40)
    batches = [(x, (x[:, 0] > 0).float()) for x in torch.randn(4, 12, 4)]
    with torch.no_grad():
        x, y = batches[1]
        y.copy_((model(3 * x)[:, 0] > 0).float())
        x.mul_(3)
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


# F scale and start


@pair("dead-relu")
def bias_drawn_far_below(faulty):
    """facebookresearch/dlrm PR #358, pytorch/benchmark PR #1927: the output is 0 everywhere and
    every derivative of the first layers is 0."""

    def create_mlp(ln):
        layers = nn.ModuleList()
        for i, (n, m) in enumerate(pairwise(ln)):
            LL = nn.Linear(n, m)
            with torch.no_grad():
                LL.weight.normal_(0.0, math.sqrt(2 / (m + n)))
                if faulty and i == 0:
                    LL.bias.normal_(0.0, 1.0).abs_().neg_().sub_(6.0)
                else:
                    LL.bias.zero_()
            layers.append(LL)
            layers.append(nn.ReLU())
        return torch.nn.Sequential(*layers[:-1])

    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.EmbeddingBag(20, 4, mode="sum")
            self.bot_l, self.top_l = create_mlp([6, 12, 4]), create_mlp([8, 16, 1])

        def forward(self, dense, sparse):
            return self.top_l(torch.cat([self.bot_l(dense), self.emb(sparse)], 1)).squeeze(1)

    def loss_fn(model, batch):
        dense, sparse, target = batch
        return F.mse_loss(model(dense, sparse), target)

    model = DLRM()
    batches = [(d := torch.rand(16, 6), torch.randint(0, 20, (16, 3)), d.mean(1)) for _ in range(4)]
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.02), batches


@pair("dead-relu", "zero-init-both")
def gate_zero_then_relu(faulty):
    """lucidrains/deep-cross-attention #2: zero-initialised aggregation followed by ReLU has no
    gradient to move off zero."""

    class GRN(nn.Module):
        def __init__(self, dim, outputs=1):
            super().__init__()
            linear = nn.Linear(dim, outputs, bias=False)
            if faulty:
                nn.init.zeros_(linear.weight)
            else:
                nn.init.normal_(linear.weight, std=0.1)
            self.to_aggregate = nn.Sequential(nn.LayerNorm(dim), linear, nn.ReLU())
            self.base = nn.Parameter(torch.ones(outputs))

        def forward(self, x):
            return x * (self.base + self.to_aggregate(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.grn, self.out = nn.Linear(6, 16), GRN(16), nn.Linear(16, 3)

        def forward(self, x):
            return self.out(self.grn(torch.tanh(self.inp(x))))

    model = Net()
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(5, 16, 6)]
    return model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("symmetric-init")
def constant_weight(faulty):
    """microsoft/vscode-python #5069 (quotes a weight-initialization notebook): with one constant
    weight in all layers the network hardly learns."""

    class Net(nn.Module):
        def __init__(self, hidden_1=24, hidden_2=16, constant_weight=None):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(36, hidden_1), nn.Linear(hidden_1, hidden_2)
            self.fc3 = nn.Linear(hidden_2, 4)
            if constant_weight is not None:
                for m in self.modules():
                    if isinstance(m, nn.Linear):
                        nn.init.constant_(m.weight, constant_weight)
                        nn.init.constant_(m.bias, 0)

        def forward(self, x):
            x = F.relu(self.fc1(x.view(-1, 36)))
            return self.fc3(F.relu(self.fc2(x)))

    model = Net(constant_weight=0.1 if faulty else None)
    x = torch.rand(80, 1, 6, 6)
    y = x.view(80, 4, 9).mean(2).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    return model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-3), loader


@pair("exploding-gradient", "initial-loss-off")
def convolutions_normal_one(faulty):
    """wkentaro/pytorch-fcn #167: after drawing the convolutions from a normal distribution the
    gradient explodes within a few iterations."""

    class FCN(nn.Module):
        def __init__(self, width=12):
            super().__init__()
            self.features = nn.ModuleList(
                nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(6)
            )
            self.score = nn.Conv2d(width, 3, 1)
            self._initialize_weights()

        def _initialize_weights(self):
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    if faulty:
                        m.weight.data.normal_(0, 1)
                    else:
                        nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                        if m is self.score:
                            m.weight.data.mul_(0.1)
                    m.bias.data.zero_()

        def forward(self, x):
            for conv in self.features:
                x = F.relu(conv(x))
            return self.score(x)

    model = FCN()
    batches = [(x, x.argmax(1)) for x in torch.randn(4, 4, 3, 6, 6)]
    return model, cross_entropy, torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9), batches


@pair("unscaled-input", "saturated-activation")
def pixels_not_divided(faulty):
    """hill-a/stable-baselines #328: images go into the network with values from 0 to 255."""

    class Cnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3)
            self.pi, self.vf = nn.Linear(6 * 16, 3), nn.Linear(6 * 16, 1)

        def forward(self, obs):
            h = torch.tanh(self.conv(obs.float())).flatten(1)
            return self.pi(h), self.vf(h).squeeze(1)

    def loss_fn(model, batch):
        obs, expert_action, value = batch
        logits, v = model(obs)
        return F.cross_entropy(logits, expert_action) + 0.5 * F.mse_loss(v, value)

    model = Cnn()
    batches = []
    for _ in range(4):
        frames = torch.randint(0, 256, (12, 1, 6, 6))
        act = frames[:, 0, :3, 0].argmax(1)
        obs = frames if faulty else frames / 255.0
        batches.append((obs, act, frames.float().mean((1, 2, 3)) / 255))
    return model, loss_fn, torch.optim.Adam(model.parameters(), 2.5e-4), batches


# G loop


def regression(hidden=20, lr=0.02, batches=8):
    model = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(batches, 16, 5)]
    return model, torch.optim.SGD(model.parameters(), lr), data


@pair("scheduler-per-batch")
def scheduler_in_batch_loop(faulty):
    """ivadomed/ivadomed PR #55: the learning rate falls much faster than configured."""

    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))

    def train(model, loss_fn, optimizer, batches, num_epochs=6):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        for _ in range(num_epochs):
            total = 0.0
            for batch in batches:
                loss = loss_fn(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if faulty:
                    scheduler.step()
                total += loss.item()
            if not faulty:
                scheduler.step()

    batches = [(x, x.roll(1, -1)) for x in torch.randn(8, 4, 1, 6, 6)]
    return model, mse, torch.optim.Adam(model.parameters(), 1e-2), batches, train


@pair("clip-after-step")
def clip_below_step(faulty):
    """VGraphRNN/VGRNN #4, awslabs/graphstorm #1366: clip_grad_norm is called after step() so it
    does not do anything."""

    class GraphRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gconv, self.cell, self.dec = nn.Linear(4, 8), nn.GRUCell(8, 8), nn.Linear(8, 8)

        def forward(self, feats, adj):
            h = torch.zeros(adj.shape[-1], 8)
            for x, a in zip(feats, adj, strict=True):
                h = self.cell(torch.relu(a @ self.gconv(x)), h)
            z = self.dec(h)
            return z @ z.T

    def loss_fn(model, batch):
        feats, adj = batch
        return F.binary_cross_entropy_with_logits(model(feats, adj), (adj[-1] > 0).float())

    def train(model, loss_fn, optimizer, batches):
        for _ in range(3):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                if not faulty:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                if faulty:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model = GraphRNN()
    batches = []
    for _ in range(5):
        a = (torch.rand(3, 7, 7) > 0.6).float()
        a = ((a + a.transpose(1, 2)) > 0).float()
        batches.append((torch.randn(3, 7, 4), a / a.sum(-1, keepdim=True).clamp(min=1)))
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


@pair("zero-grad-before-step")
def zero_grad_right_before_step(faulty):
    """lucidrains/byol-pytorch #93: the trainer sets gradients to zero right before it steps."""

    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
            self.predictor = nn.Linear(16, 16)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, one, two):
            p = F.normalize(self.predictor(self.online(one)), dim=-1)
            with torch.no_grad():
                t = F.normalize(self.target(two), dim=-1)
            return (2 - 2 * (p * t).sum(-1)).mean()

    def loss_fn(model, batch):
        return model(*batch) + model(*reversed(batch))

    def train(model, loss_fn, optimizer, batches):
        for _ in range(3):
            for batch in batches:
                if not faulty:
                    optimizer.zero_grad()
                loss_fn(model, batch).backward()
                if faulty:
                    optimizer.zero_grad()
                optimizer.step()
                with torch.no_grad():
                    old, new = model.target.parameters(), model.online.parameters()
                    for t, o in zip(old, new, strict=True):
                        t.lerp_(o, 0.01)

    model = Byol()
    batches = []
    for x in torch.randn(5, 16, 8):
        batches.append((x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)))
    params = chain(model.online.parameters(), model.predictor.parameters())
    return model, loss_fn, torch.optim.Adam(params, 1e-3), batches, train


@pair("missing-step", "optimizer-missing-params")
def discriminator_never_steps(faulty):
    """zhaoyuzhi/deepfillv2 #6: the discriminator's parameters do not update."""

    class Inpaint(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(12, 24), nn.ELU(), nn.Linear(24, 6))
            self.discriminator = nn.Sequential(
                nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)
            )

    def loss_fn(model, batch):
        img, mask = batch
        fake = model.generator(torch.cat([img * (1 - mask), mask], 1))
        return F.l1_loss(fake, img) - 0.1 * model.discriminator(fake).mean()

    def train(model, loss_fn, optimizer, batches):
        optimizer_g, optimizer_d = optimizer
        for _ in range(3):
            for img, mask in batches:
                optimizer_d.zero_grad()
                with torch.no_grad():
                    fake = model.generator(torch.cat([img * (1 - mask), mask], 1))
                real_loss = F.relu(1 - model.discriminator(img)).mean()
                loss_d = 0.5 * (real_loss + F.relu(1 + model.discriminator(fake)).mean())
                loss_d.backward()
                if not faulty:
                    optimizer_d.step()
                optimizer_g.zero_grad()
                loss_fn(model, (img, mask)).backward()
                optimizer_g.step()

    model = Inpaint()
    optimizers = (
        torch.optim.Adam(model.generator.parameters(), 1e-3),
        torch.optim.Adam(model.discriminator.parameters(), 1e-3),
    )
    batches = [(torch.randn(12, 6), (torch.rand(12, 6) > 0.7).float()) for _ in range(5)]
    return model, loss_fn, optimizers, batches, train


@pair("clip-before-unscale")
def clip_scaled_gradients(faulty):
    """milesial/Pytorch-UNet PR #470, victorchall/EveryDream2trainer PR #175: with AMP a usual
    clipping value effectively halts training."""

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        for _ in range(3):
            for batch in batches:
                optimizer.zero_grad(set_to_none=True)
                loss = loss_fn(model, batch)
                scaler.scale(loss).backward()
                if not faulty:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)
    )
    batches = [(x, (x[:, 0] > 0).long()) for x in torch.randn(5, 4, 1, 6, 6)]
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, cross_entropy, opt, batches, train


@pair("missing-zero-grad")
def zero_grad_once_per_epoch(faulty):
    """pytorch/pytorch #47175: zero_grad() stands at the start of each epoch instead of each
    iteration, an extremely nasty bug to find."""

    def train(model, loss_fn, optimizer, batches):
        for _ in range(4):
            optimizer.zero_grad()
            for batch in batches:
                if not faulty:
                    optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    model, optimizer, data = regression()
    return model, mse, optimizer, data, train


@pair("optimizer-recreated")
def optimizer_inside_train_function(faulty):
    """haydnv/tinychain PR #51: a new optimizer is created on every training cycle."""

    def train_step(model, loss_fn, optimizer, batch):
        if faulty:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(4):
            for batch in batches:
                train_step(model, loss_fn, optimizer, batch)

    model, _, data = regression()
    return model, mse, torch.optim.Adam(model.parameters(), lr=1e-2), data, train


@pair("accumulation-unscaled")
def accumulate_without_dividing(faulty):
    """hirofumi0810/neural_sp #168: the loss should be divided by accum_grad_n_steps."""

    class Asr(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.LSTM(6, 10, batch_first=True, bidirectional=True)
            self.out = nn.Linear(20, 5)

        def forward(self, feats):
            return self.out(self.enc(feats)[0]).log_softmax(-1)

    def loss_fn(model, batch):
        feats, tokens = batch
        n, t = feats.shape[:2]
        lengths = torch.full((n,), t), torch.full((n,), tokens.shape[1])
        return F.ctc_loss(model(feats).transpose(0, 1), tokens, *lengths)

    def train(model, loss_fn, optimizer, batches, accum_grad_n_steps=4):
        accum = 0
        for _ in range(2):
            for batch in batches:
                loss = loss_fn(model, batch)
                if not faulty:
                    loss = loss / accum_grad_n_steps
                loss.backward()
                accum += 1
                if accum == accum_grad_n_steps:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    accum = 0

    model = Asr()
    batches = [(torch.randn(3, 12, 6), torch.randint(1, 5, (3, 4))) for _ in range(8)]
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), batches, train


@pair("clip-noop", "clip-after-step")
def clip_in_training_step(faulty):
    """simchowitzlabpublic/nano-world-model PR #22: clipping stands in training_step, before
    backward(); the gradient norm is never capped."""

    def train(model, loss_fn, optimizer, batches):
        for _ in range(3):
            for batch in batches:
                loss = loss_fn(model, batch)
                if faulty:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.zero_grad()
                loss.backward()
                if not faulty:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    model, optimizer, data = regression(lr=0.05)
    return model, mse, optimizer, data, train


@pair("lr-too-high")
def adam_with_rate_one(faulty):
    """rajveermalviya/language-modeling #3: the config says learning rate 1.0 with Adam, the loss
    does not really go down after many epochs."""

    class LM(nn.Module):
        def __init__(self, ntoken=14, n=16):
            super().__init__()
            self.encoder, self.norm = nn.Embedding(ntoken, n), nn.LayerNorm(n)
            self.rnn = nn.LSTM(n, n, 2, batch_first=True)
            self.decoder = nn.Sequential(nn.Linear(n, 2 * n), nn.ReLU(), nn.Linear(2 * n, ntoken))

        def forward(self, ids):
            return self.decoder(self.norm(self.rnn(self.encoder(ids))[0]))

    def loss_fn(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def train(model, loss_fn, optimizer, batches):
        for _ in range(6):
            for ids in batches:
                optimizer.zero_grad()
                loss_fn(model, ids).backward()
                optimizer.step()

    model = LM()
    following = torch.randint(0, 14, (14, 3))
    text = [torch.randint(0, 14, (48,))]
    for _ in range(8):
        text.append(following[text[-1], torch.randint(0, 3, (48,))])
    batches = list(torch.stack(text, 1).view(6, 8, 9))
    lr = 1.0 if faulty else 1e-2
    return model, loss_fn, torch.optim.Adam(model.parameters(), lr), batches, train


# H mode, memory and graph


@pair("eval-mode-left-on")
def validate_inside_epoch(faulty):
    """wkentaro/pytorch-fcn #57: after validation the model is not set back to training mode; the
    training loss jumps at the start of an epoch."""

    class Trainer:
        def __init__(self, model, loss_fn, optim, loader):
            self.model, self.loss_fn, self.optim, self.loader = model, loss_fn, optim, loader
            self.iteration = 0

        def validate(self):
            self.model.eval()
            with torch.no_grad():
                value = sum(self.loss_fn(self.model, b).item() for b in self.loader[:2])
            if not faulty:
                self.model.train()
            return value

        def train_epoch(self):
            self.model.train()
            for batch in self.loader:
                if self.iteration % 4 == 2:
                    self.validate()
                self.iteration += 1
                self.optim.zero_grad()
                self.loss_fn(self.model, batch).backward()
                self.optim.step()

    def train(model, loss_fn, optimizer, batches):
        trainer = Trainer(model, loss_fn, optimizer, batches)
        for _ in range(3):
            trainer.train_epoch()

    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3)
    )
    model.append(nn.Conv2d(8, 2, 1))
    batches = [(x, x.argmax(1)) for x in torch.randn(6, 4, 2, 5, 5)]
    return model, cross_entropy, torch.optim.SGD(model.parameters(), 0.02), batches, train


@pair("graph-retained")
def outputs_kept_for_the_epoch(faulty):
    """TRI-ML/packnet-sfm #47 and PR #51: memory grows over an epoch and is freed after it."""

    def train(model, loss_fn, optimizer, batches):
        for _ in range(2):
            outputs = []
            for batch in batches:
                optimizer.zero_grad()
                output = {"loss": loss_fn(model, batch), "metrics": {}}
                output["loss"].backward()
                optimizer.step()
                if not faulty:
                    output["loss"] = output["loss"].detach()
                outputs.append(output)
            torch.stack([o["loss"].detach() for o in outputs]).mean()

    model, optimizer, data = regression(batches=24)
    return model, mse, optimizer, data, train


@pair("dropout-in-eval")
def dropout_function_always_on(faulty):
    """ewrfcas/face_attribute_classification_pytorch #1: the dropout used cannot be deactivated
    with model.eval()."""

    class FaceAttr(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 8, 3, stride=2)
            self.fc1, self.fc2 = nn.Linear(8 * 9, 16), nn.Linear(16, 5)

        def forward(self, x):
            x = F.relu(self.conv1(x)).flatten(1)
            x = F.dropout(x, 0.5) if faulty else F.dropout(x, 0.5, self.training)
            return self.fc2(F.relu(self.fc1(x)))

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    model = FaceAttr()
    batches = [
        (x, (x[:, :, 0, 0].repeat(1, 2)[:, :5] > 0).float()) for x in torch.randn(4, 8, 3, 7, 7)
    ]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("second-backward")
def hidden_state_survives_batch(faulty):
    """sgadgil6/cnslab_fmri #4: 'Trying to backward through the graph a second time'."""

    class fMRI_LSTM(nn.Module):
        def __init__(self, hidden_dim=8, input_dim=4):
            super().__init__()
            self.lstm = nn.LSTM(input_dim, hidden_dim, num_layers=1, batch_first=True)
            self.linear = nn.Linear(hidden_dim, 1)
            self.hidden = None

        def forward(self, x):
            if self.hidden is not None and not faulty:
                self.hidden = tuple(h.detach() for h in self.hidden)
            lstm_out, self.hidden = self.lstm(x, self.hidden)
            return self.linear(lstm_out[:, -1, :])

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    def train(model, loss_fn, optimizer, batches):
        for _ in range(2):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    model = fMRI_LSTM()
    batches = [(x, (x.mean((1, 2)) > 0).float()) for x in torch.randn(4, 6, 5, 4)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), batches, train


@pair("checkpoint-input-no-grad")
def checkpoint_after_frozen_embedding(faulty):
    """huggingface/transformers #21381 and #23170: frozen embeddings and gradient checkpointing
    together, and the layers behind them get no gradient."""

    class Bert(nn.Module):
        def __init__(self, vocab=20, dim=8, layers=2):
            super().__init__()
            self.embeddings = nn.Embedding(vocab, dim).requires_grad_(False)
            self.layer = nn.ModuleList(
                nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
            self.cls = nn.Linear(dim, 2)

        def forward(self, ids):
            h = self.embeddings(ids)
            for layer in self.layer:
                h = checkpoint(layer, h, use_reentrant=faulty)
            return self.cls(h[:, 0])

    model = Bert()
    batches = [(i := torch.randint(0, 20, (6, 5)), i[:, 0] % 2) for _ in range(4)]
    params = [p for p in model.parameters() if p.requires_grad]
    return model, cross_entropy, torch.optim.AdamW(params, 1e-3, weight_decay=0), batches


@pair("inplace-modified")
def relu_output_overwritten(faulty):
    """qianyu-dlut/MVANet #2: 'ReluBackward0 ... modified by an inplace operation' in training."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear1, self.linear2 = nn.Linear(8, 16), nn.Linear(16, 8)
            self.dropout = nn.Dropout(0.1, inplace=True)

        def forward(self, g):
            h = torch.relu(self.linear1(g))
            return g + self.linear2(self.dropout(h if faulty else h.clone()))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.block(x))

    model = Net()
    batches = [(x, x[:, :1]) for x in torch.randn(4, 10, 8)]
    return model, mse, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("leaf-inplace")
def manual_update_in_place(faulty):
    """BaiTheBest/SparseLLM #13, pytorch/examples PR #779: 'a leaf Variable that requires grad is
    being used in an in-place operation' at the hand-written update."""

    def train(model, loss_fn, optimizer, batches):
        for _ in range(2):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                for p in model.parameters():
                    if faulty:
                        p -= 1e-3 * p
                    else:
                        p.data -= 1e-3 * p.data

    model, optimizer, data = regression()
    return model, mse, optimizer, data, train


# I set-up


@pair("weight-decay-on-norm-bias", note=True)
def no_decay_names_do_not_match(faulty):
    """deepspeedai/DeepSpeedExamples PR #755: the no-decay list says LayerNorm.weight, the model's
    norms are called ln_1 and ln_f."""

    class Block(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.ln_1, self.mlp = nn.LayerNorm(n), nn.Sequential(nn.Linear(n, 2 * n), nn.GELU())
            self.proj = nn.Linear(2 * n, n)

        def forward(self, x):
            return x + self.proj(self.mlp(self.ln_1(x)))

    class Gpt(nn.Module):
        def __init__(self, n=12):
            super().__init__()
            self.inp = nn.Linear(6, n)
            self.h = nn.ModuleList(Block(n) for _ in range(2))
            self.ln_f, self.head = nn.LayerNorm(n), nn.Linear(n, 3)

        def forward(self, x):
            x = self.inp(x)
            for block in self.h:
                x = block(x)
            return self.head(self.ln_f(x))

    model = Gpt()
    no_decay = ["bias", "LayerNorm.weight"] if faulty else ["bias", "ln_1.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(d in n for d in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(5, 16, 6)]
    return model, cross_entropy, torch.optim.AdamW(groups, lr=1e-3), batches


@pair("weight-decay-on-norm-bias", note=True)
def decay_on_batchnorm(faulty):
    """pytorch/pytorch #1402, facebookresearch/ClassyVision PR #177: weight decay is applied to
    batch norm's gain and shift too."""

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4, bias=False),
    )
    decay = [m.weight for m in model if isinstance(m, nn.Conv2d | nn.Linear)]
    groups = [{"params": decay, "weight_decay": 5e-2}]
    groups.append({"params": model[1].parameters(), "weight_decay": 5e-2 if faulty else 0.0})
    batches = [(torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))) for _ in range(4)]
    return model, cross_entropy, torch.optim.SGD(groups, lr=0.05, momentum=0.9), batches


# healthy, and reported as suspicious


@healthy
def flow_likelihood_negative(seed):
    """marco-rudolph/cs-flow #28, differnet #10: the training loss becomes negative."""
    torch.manual_seed(seed)

    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x):
            a, b = x.chunk(2, 1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, 1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList(Coupling(i % 2) for i in range(4))

        def forward(self, x):
            jac = 0.0
            for step in self.steps:
                x, j = step(x)
                jac = jac + j
            return x, jac

    def get_loss(model, batch):
        z, jac = model(batch)
        return torch.mean(0.5 * torch.sum(z**2, dim=1) - jac) / z.shape[1]

    model = Flow()
    ring = torch.randn(6, 32, 2)
    batches = [torch.cat([x, 1.5 * x + 0.02 * torch.randn(32, 2)], 1) for x in ring]

    def train(model, loss_fn, optimizer, batches):
        for _ in range(14):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, get_loss, torch.optim.Adam(model.parameters(), 1e-2), batches, train


@healthy
def simsiam_negative_cosine(seed):
    """facebookresearch/simsiam #44 and #21, PatrickHua/SimSiam #22: the loss is negative, and one
    branch is detached."""
    torch.manual_seed(seed)

    class SimSiam(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(10, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim)
            )
            self.predictor = nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    criterion = nn.CosineSimilarity(dim=1)

    def loss_fn(model, batch):
        p1, p2, z1, z2 = model(*batch)
        return -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5

    model = SimSiam()
    batches = []
    for x in torch.randn(5, 16, 10):
        batches.append((x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)))
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batches


@healthy
def zero_gamma_last_batchnorm(seed):
    """tensorpack/tensorpack #420: why is gamma of the last batch norm of each block zero?"""
    torch.manual_seed(seed)

    class Bottleneck(nn.Module):
        def __init__(self, ch):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(ch, ch, 1, bias=False), nn.BatchNorm2d(ch)
            self.conv2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(ch)
            nn.init.zeros_(self.bn2.weight)

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            return F.relu(x + self.bn2(self.conv2(out)))

    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        Bottleneck(8),
        Bottleneck(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    batches = [(torch.randn(8, 2, 6, 6), torch.randint(0, 3, (8,))) for _ in range(4)]
    return net, cross_entropy, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), batches


@healthy
def attention_scale_starts_at_zero(seed):
    """Serge-weihao/CCNet-Pure-Pytorch #5: why is self.gamma zero?"""
    torch.manual_seed(seed)

    class Attention(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.query, self.key = nn.Conv2d(dim, dim // 4, 1), nn.Conv2d(dim, dim // 4, 1)
            self.value = nn.Conv2d(dim, dim, 1)
            self.gamma = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            q, k, v = (m(x).flatten(2) for m in (self.query, self.key, self.value))
            weights = torch.softmax(q.transpose(1, 2) @ k, dim=-1)
            return self.gamma * (v @ weights.transpose(1, 2)).view_as(x) + x

    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Attention(8), nn.Conv2d(8, 1, 3, padding=1)
    )
    batches = [(x, x.flip(-1)) for x in torch.randn(4, 4, 1, 6, 6)]
    return net, mse, torch.optim.Adam(net.parameters(), 1e-3), batches


@healthy
def last_layer_zero_weights(seed):
    """smallflyingpig/universal_adversarial_perturbation_generative_network_for_speaker_recognition
    #4: the last convolution starts at zero, so are all gradients zero?"""
    torch.manual_seed(seed)
    generator = nn.Sequential(
        nn.ConvTranspose1d(4, 8, 4, 2), nn.PReLU(), nn.ConvTranspose1d(8, 1, 4, 2)
    )
    nn.init.zeros_(generator[2].weight)
    nn.init.zeros_(generator[2].bias)
    victim = nn.Sequential(nn.Conv1d(1, 6, 5, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    victim(torch.zeros(1, 1, 18))
    victim.requires_grad_(False)

    def loss_fn(model, batch):
        noise, wav, target = batch
        delta = torch.tanh(model(noise)) * 0.5
        return F.cross_entropy(victim(wav + delta), target) + 0.1 * delta.pow(2).mean()

    batches = [(torch.randn(6, 4, 3), torch.randn(6, 1, 18), torch.full((6,), 1)) for _ in range(4)]
    return generator, loss_fn, torch.optim.Adam(generator.parameters(), 1e-2), batches


@healthy
def convolution_bias_before_norm(seed):
    """milesial/Pytorch-UNet PR #325, 4uiiurz1/pytorch-nested-unet #39: the bias before batch norm
    is redundant."""
    torch.manual_seed(seed)

    class DoubleConv(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.double_conv = nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
            )

        def forward(self, x):
            return self.double_conv(x)

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc, self.down = DoubleConv(1, 6), DoubleConv(6, 8)
            self.up, self.outc = DoubleConv(14, 6), nn.Conv2d(6, 2, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = F.interpolate(self.down(F.max_pool2d(x1, 2)), scale_factor=2)
            return self.outc(self.up(torch.cat([x1, x2], 1)))

    net = UNet()
    batches = [(x, (x[:, 0] > 0).long()) for x in torch.randn(4, 4, 1, 8, 8)]
    return net, cross_entropy, torch.optim.RMSprop(net.parameters(), 1e-4, momentum=0.9), batches


@healthy
def language_model_detached_states(seed):
    """yunjey/pytorch-tutorial #90: what does states = detach(states) do?"""
    torch.manual_seed(seed)

    class RNNLM(nn.Module):
        def __init__(self, vocab=12, n=10):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(vocab, n), nn.LSTM(n, n, batch_first=True)
            self.linear = nn.Linear(n, vocab)
            self.embed.weight.data.uniform_(-0.1, 0.1)

        def forward(self, x, h):
            out, h = self.lstm(self.embed(x), h)
            return self.linear(out.reshape(-1, out.size(2))), h

    def loss_fn(model, batch):
        inputs, targets = batch
        zero = torch.zeros(1, len(inputs), 10)
        return F.cross_entropy(model(inputs, (zero, zero))[0], targets.reshape(-1))

    def train(model, loss_fn, optimizer, batches):
        for _ in range(2):
            states = (torch.zeros(1, 4, 10), torch.zeros(1, 4, 10))
            for inputs, targets in batches:
                states = [state.detach() for state in states]
                outputs, states = model(inputs, states)
                loss = F.cross_entropy(outputs, targets.reshape(-1))
                model.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

    model = RNNLM()
    text = torch.randint(0, 12, (4, 49))
    batches = [(text[:, i : i + 8], text[:, i + 1 : i + 9]) for i in range(0, 48, 8)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-3), batches, train


@healthy
def ema_teacher(seed):
    """lhoyer/DAFormer #59: why is there no gradient in the teacher network?"""
    torch.manual_seed(seed)

    class DACS(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
            self.ema_model = copy.deepcopy(self.model)
            for param in self.ema_model.parameters():
                param.detach_()

    def loss_fn(model, batch):
        img, label, target_img = batch
        clean = F.cross_entropy(model.model(img), label)
        logits = model.ema_model(target_img).detach()
        prob, pseudo = torch.softmax(logits, dim=1).max(1)
        weight = (prob > 0.3).float().mean()
        return clean + weight * F.cross_entropy(model.model(target_img), pseudo)

    def train(model, loss_fn, optimizer, batches):
        it = 0
        for _ in range(3):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                it += 1
                alpha = min(1 - 1 / (it + 1), 0.99)
                ema, student = model.ema_model.parameters(), model.model.parameters()
                for e, p in zip(ema, student, strict=True):
                    e.data[:] = alpha * e[:].data[:] + (1 - alpha) * p[:].data[:]

    model = DACS()
    batches = [(x, x.argmax(1), x + 0.3 * torch.randn_like(x)) for x in torch.randn(4, 4, 3, 5, 5)]
    return model, loss_fn, torch.optim.AdamW(model.model.parameters(), 1e-3), batches, train


@healthy
def top_one_experts(seed):
    """lucidrains/mixture-of-experts #7: how do experts get a gradient through a top-1 choice?"""
    torch.manual_seed(seed)

    class MoE(nn.Module):
        def __init__(self, dim=8, experts=6):
            super().__init__()
            self.gate = nn.Linear(dim, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
                for _ in range(experts)
            )

        def forward(self, x):
            probability, index = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                chosen = (index == i).nonzero().squeeze(1)
                if len(chosen):
                    out = out.index_add(0, chosen, expert(x[chosen]))
            return x + out * probability[:, None]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.moe, self.out = nn.Linear(5, 8), MoE(), nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.moe(torch.tanh(self.inp(x))))

    model = Net()
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(8, 6, 5)]
    return model, cross_entropy, torch.optim.Adam(model.parameters(), 3e-3), batches


@healthy
def one_box_head_for_all_levels(seed):
    """IDEA-Research/DAB-DETR PR #17: nn.ModuleList([bbox_embed for i in range(N)]) shares weights;
    the same box head is meant to read every decoder level."""
    torch.manual_seed(seed)

    class Detr(nn.Module):
        def __init__(self, dim=8, levels=3):
            super().__init__()
            self.query = nn.Parameter(torch.randn(4, dim))
            self.decoder = nn.ModuleList(
                nn.TransformerDecoderLayer(dim, 2, 16, dropout=0.0, batch_first=True)
                for _ in range(levels)
            )
            bbox_embed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))
            self.bbox_embed = nn.ModuleList([bbox_embed for _ in range(levels)])

        def forward(self, memory):
            h, boxes = self.query.expand(len(memory), -1, -1), []
            for layer, head in zip(self.decoder, self.bbox_embed, strict=True):
                h = layer(h, memory)
                boxes.append(head(h).sigmoid())
            return torch.stack(boxes)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).abs().mean((1, 2, 3)).sum()

    model = Detr()
    batches = [(m, torch.sigmoid(m[:, :4, :4])) for m in torch.randn(4, 3, 5, 8)]
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0), batches


@healthy
def label_smoothing_floor(seed):
    """lxztju/pytorch_classification #9, pytorch/pytorch #130342: the loss settles at 0.6 although
    the accuracy is 99 percent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 6))
    batches = [
        (3 * F.one_hot(y, 6) + 0.3 * torch.randn(24, 6), y) for y in torch.randint(0, 6, (5, 24))
    ]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def train(model, loss_fn, optimizer, batches):
        for _ in range(15):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


@healthy
def log_softmax_then_cross_entropy(seed):
    """Randl/MobileNetV2-pytorch #5, bhanML/Co-teaching #4: log_softmax is applied twice; the second
    time changes nothing."""
    torch.manual_seed(seed)

    class MobileNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 12, 3, stride=2, bias=False)
            self.bn, self.act = nn.BatchNorm2d(12), nn.ReLU6(inplace=True)
            self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
            self.fc = nn.Linear(12, 5)

        def forward(self, x):
            x = self.depth(self.act(self.bn(self.conv(x)))).mean((2, 3))
            return F.log_softmax(self.fc(x), dim=1)

    net = MobileNet()
    batches = [(torch.randn(10, 2, 7, 7), torch.randint(0, 5, (10,))) for _ in range(4)]
    return net, cross_entropy, torch.optim.SGD(net.parameters(), 0.02, momentum=0.9), batches


@healthy
def negative_si_sdr(seed):
    """zexupan/MuSE #2: is it normal for the loss to be negative during training?"""
    torch.manual_seed(seed)

    class Separator(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Conv1d(1, 12, 4, stride=2, bias=False)
            self.mask = nn.Sequential(
                nn.Conv1d(12, 12, 3, padding=1), nn.PReLU(), nn.Conv1d(12, 12, 1)
            )
            self.dec = nn.ConvTranspose1d(12, 1, 4, stride=2, bias=False)

        def forward(self, mix):
            w = F.relu(self.enc(mix[:, None]))
            return self.dec(w * torch.sigmoid(self.mask(w)))[:, 0]

    def si_sdr(est, ref, eps=1e-8):
        ref = ref - ref.mean(-1, keepdim=True)
        est = est - est.mean(-1, keepdim=True)
        scale = (est * ref).sum(-1, keepdim=True) / (ref.pow(2).sum(-1, keepdim=True) + eps)
        target = scale * ref
        noise = est - target
        ratio = target.pow(2).sum(-1) / (noise.pow(2).sum(-1) + eps)
        return 10 * torch.log10(ratio + eps)

    def loss_fn(model, batch):
        mix, clean = batch
        return -si_sdr(model(mix), clean).mean()

    model = Separator()
    t = torch.arange(40) / 4
    batches = []
    for _ in range(5):
        clean = torch.sin(t * (1 + torch.rand(6, 1)))
        batches.append((clean + 0.05 * torch.randn(6, 40), clean))
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@healthy
def ppo_ratio_one(seed):
    """hill-a/stable-baselines #458, MorvanZhou/Reinforcement-learning-with-tensorflow #65: the
    policy ratio is 1 and the policy loss 0 in the first step."""
    torch.manual_seed(seed)

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.pi = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
            self.vf = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    model = ActorCritic()
    batches = []
    for _ in range(4):
        obs = torch.randn(24, 4)
        with torch.no_grad():
            dist = torch.distributions.Categorical(logits=model.pi(obs))
            act = dist.sample()
            old = dist.log_prob(act)
        adv = torch.where(act == (obs[:, 0] > 0), 1.0, -1.0) + 0.1 * torch.randn(24)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        batches.append({"obs": obs, "act": act, "old": old, "adv": adv, "ret": adv + obs[:, 1]})

    def loss_fn(model, b):
        dist = torch.distributions.Categorical(logits=model.pi(b["obs"]))
        ratio = torch.exp(dist.log_prob(b["act"]) - b["old"])
        clipped = torch.clamp(ratio, 0.8, 1.2)
        policy = -torch.min(ratio * b["adv"], clipped * b["adv"]).mean()
        value = F.mse_loss(model.vf(b["obs"]).squeeze(1), b["ret"])
        return policy + 0.5 * value - 0.01 * dist.entropy().mean()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(4):
            for b in batches:
                optimizer.zero_grad()
                loss_fn(model, b).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-4, eps=1e-5), batches, train


@healthy
def gan_retains_graph(seed):
    """VITA-Group/DeblurGANv2 #19, MorvanZhou/PyTorch-Tutorial #96: why retain_graph=True when the
    discriminator is updated?"""
    torch.manual_seed(seed)

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.G = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 8))
            self.D = nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

    def loss_fn(model, batch):
        noise, real = batch
        fake = model.D(model.G(noise).detach())
        true = model.D(real)
        return F.softplus(-true).mean() + F.softplus(fake).mean()

    def train(model, loss_fn, optimizer, batches):
        opt_d, opt_g = optimizer
        for _ in range(3):
            for noise, real in batches:
                art = model.G(noise)
                d_loss = F.softplus(-model.D(real)).mean() + F.softplus(model.D(art)).mean()
                opt_d.zero_grad()
                d_loss.backward(retain_graph=True)
                opt_d.step()
                g_loss = F.softplus(-model.D(art)).mean()
                opt_g.zero_grad()
                g_loss.backward()
                opt_g.step()

    model = Gan()
    opts = (
        torch.optim.Adam(model.D.parameters(), 1e-3),
        torch.optim.Adam(model.G.parameters(), 1e-3),
    )
    batches = [(torch.randn(16, 5), torch.randn(16, 8) + 1) for _ in range(5)]
    return model, loss_fn, opts, batches, train


@healthy
def encoder_norms_kept_in_eval(seed):
    """hkchengrex/Cutie #135: train() is overridden in the encoders; are they frozen? Only their
    batch norms use fixed statistics."""
    torch.manual_seed(seed)

    class PixelEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            return F.relu(self.bn2(self.conv2(x)))

        def train(self, mode=True):
            self.training = False
            for module in self.children():
                module.train(False)
            return self

    class Cutie(nn.Module):
        def __init__(self):
            super().__init__()
            self.pixel_encoder, self.drop = PixelEncoder(), nn.Dropout(0.1)
            self.mask_decoder = nn.Conv2d(8, 2, 1)
            self.train()

        def forward(self, x):
            return self.mask_decoder(self.drop(self.pixel_encoder(x)))

    def train(model, loss_fn, optimizer, batches):
        for _ in range(3):
            model.train()
            for batch in batches:
                optimizer.zero_grad(set_to_none=True)
                loss_fn(model, batch).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                loss_fn(model, batches[0])

    model = Cutie()
    batches = [(x, (x[:, 0] > x[:, 1]).long()) for x in torch.randn(5, 4, 3, 6, 6)]
    opt = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-3)
    return model, cross_entropy, opt, batches, train


@healthy
def binarized_weights(seed):
    """itayhubara/BinaryNet.pytorch #9: sign() is applied to .data and never seen by autograd; does
    the function use a straight-through estimator?"""
    torch.manual_seed(seed)

    class BinarizeLinear(nn.Linear):
        def forward(self, input):
            if not hasattr(self.weight, "org"):
                self.weight.org = self.weight.data.clone()
            self.weight.data = self.weight.org.sign()
            return F.linear(input, self.weight, self.bias)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.bn1 = BinarizeLinear(8, 32), nn.BatchNorm1d(32)
            self.fc2 = nn.Linear(32, 3)

        def forward(self, x):
            return self.fc2(F.hardtanh(self.bn1(self.fc1(x))))

    def train(model, loss_fn, optimizer, batches):
        for _ in range(3):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                for p in model.parameters():
                    if hasattr(p, "org"):
                        p.data.copy_(p.org)
                optimizer.step()
                for p in model.parameters():
                    if hasattr(p, "org"):
                        p.org.copy_(p.data.clamp_(-1, 1))

    model = Net()
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(6, 24, 8)]
    return model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), batches, train
