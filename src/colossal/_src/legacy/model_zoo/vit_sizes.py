"""Vision transformers of the sizes that have names."""

from typing import Any

from colossal._src.legacy.model_zoo.vit import VisionTransformer


def create_vit_model(**model_kwargs: Any) -> VisionTransformer:
    """Build a vision transformer.

    Args:
        **model_kwargs: The arguments of `VisionTransformer`.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import create_vit_model
        >>> len(create_vit_model(img_size=8, patch_size=4, depth=2, num_heads=2, dim=8).blocks)
        2
    """
    return VisionTransformer(**model_kwargs)


def vit_tiny_patch4_32(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 192 features, for 32 x 32 pixels in patches of 4 x 4.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_tiny_patch4_32
        >>> model = vit_tiny_patch4_32(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 32, "patch_size": 4, "dim": 192, "depth": 12, "num_heads": 3, "num_classes": 10}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_tiny_patch16_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 192 features, for 224 x 224 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_tiny_patch16_224
        >>> model = vit_tiny_patch16_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 16, "dim": 192, "depth": 12, "num_heads": 3}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_tiny_patch16_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 192 features, for 384 x 384 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_tiny_patch16_384
        >>> model = vit_tiny_patch16_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 16, "dim": 192, "depth": 12, "num_heads": 3}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_small_patch16_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 384 features, for 224 x 224 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_small_patch16_224
        >>> model = vit_small_patch16_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 16, "dim": 384, "depth": 12, "num_heads": 6}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_small_patch16_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 384 features, for 384 x 384 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_small_patch16_384
        >>> model = vit_small_patch16_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 16, "dim": 384, "depth": 12, "num_heads": 6}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_small_patch32_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 384 features, for 224 x 224 pixels in patches of 32 x 32.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_small_patch32_224
        >>> model = vit_small_patch32_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 32, "dim": 384, "depth": 12, "num_heads": 6}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_small_patch32_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 384 features, for 384 x 384 pixels in patches of 32 x 32.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_small_patch32_384
        >>> model = vit_small_patch32_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 32, "dim": 384, "depth": 12, "num_heads": 6}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_base_patch16_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 768 features, for 224 x 224 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_base_patch16_224
        >>> model = vit_base_patch16_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 16, "dim": 768, "depth": 12, "num_heads": 12}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_base_patch16_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 768 features, for 384 x 384 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_base_patch16_384
        >>> model = vit_base_patch16_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 16, "dim": 768, "depth": 12, "num_heads": 12}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_base_patch32_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 768 features, for 224 x 224 pixels in patches of 32 x 32.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_base_patch32_224
        >>> model = vit_base_patch32_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 32, "dim": 768, "depth": 12, "num_heads": 12}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_base_patch32_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 12 blocks of 768 features, for 384 x 384 pixels in patches of 32 x 32.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_base_patch32_384
        >>> model = vit_base_patch32_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 32, "dim": 768, "depth": 12, "num_heads": 12}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_large_patch16_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 24 blocks of 1024 features, for 224 x 224 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_large_patch16_224
        >>> model = vit_large_patch16_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 16, "dim": 1024, "depth": 24, "num_heads": 16}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_large_patch16_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 24 blocks of 1024 features, for 384 x 384 pixels in patches of 16 x 16.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_large_patch16_384
        >>> model = vit_large_patch16_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 16, "dim": 1024, "depth": 24, "num_heads": 16}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_large_patch32_384(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 24 blocks of 1024 features, for 384 x 384 pixels in patches of 32 x 32.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_large_patch32_384
        >>> model = vit_large_patch32_384(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 384, "patch_size": 32, "dim": 1024, "depth": 24, "num_heads": 16}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_huge_patch14_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 32 blocks of 1280 features, for 224 x 224 pixels in patches of 14 x 14.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_huge_patch14_224
        >>> model = vit_huge_patch14_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 14, "dim": 1280, "depth": 32, "num_heads": 16}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_giant_patch14_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 40 blocks of 1408 features, for 224 x 224 pixels in patches of 14 x 14.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_giant_patch14_224
        >>> model = vit_giant_patch14_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 14, "dim": 1408, "depth": 40, "num_heads": 16, "mlp_ratio": 48 / 11}
    return VisionTransformer(**{**sizes, **kwargs})


def vit_gigantic_patch14_224(**kwargs: Any) -> VisionTransformer:
    """Build a vision transformer with 48 blocks of 1664 features, for 224 x 224 pixels in patches of 14 x 14.

    Args:
        **kwargs: Further arguments of `VisionTransformer`, which win.

    Returns:
        The model.

    Communication: as `VisionTransformer`.

    Example:
        >>> from colossal.legacy.model_zoo.vit import vit_gigantic_patch14_224
        >>> model = vit_gigantic_patch14_224(dim=32, depth=1, num_heads=2)
        >>> len(model.blocks)
        1
    """
    sizes = {"img_size": 224, "patch_size": 14, "dim": 1664, "depth": 48, "num_heads": 16, "mlp_ratio": 64 / 13}
    return VisionTransformer(**{**sizes, **kwargs})
