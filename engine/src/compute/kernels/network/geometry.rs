//! Images, and the windows that slide over them.

use super::super::windows::Axis;

/// Images and the windows that slide over them: depth, height and width, of which those that there are not are 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    pub(crate) images: usize,
    pub(crate) sides: [Axis; 3],
}

impl Geometry {
    /// The most axes of an image.
    pub(crate) const MOST: usize = 3;

    /// The geometry of at most three axes behind one another.
    pub(crate) fn new(images: usize, sides: &[Axis]) -> Self {
        let mut all = [Axis::pointwise(1); 3];
        all[3 - sides.len()..].copy_from_slice(sides);
        Self { images, sides: all }
    }

    /// How many elements a window has.
    pub(crate) fn kernel(&self) -> usize {
        self.sides.iter().map(|side| side.kernel).product()
    }

    /// Whether each result sees its own pixel and nothing else.
    pub(crate) fn is_pointwise(&self) -> bool {
        let same = |side: &Axis| side.kernel == 1 && side.stride == 1 && side.is_inside();
        self.sides.iter().all(same)
    }

    /// Height and width, where there is no depth. An image whose results each see their own pixel alone is one line.
    pub(super) fn plane(&self) -> Option<[Axis; 2]> {
        let [depth, height, width] = self.sides;
        if depth.read != 1 || depth.made != 1 || depth.kernel != 1 {
            return None;
        }
        Some(match self.is_pointwise() {
            true => [Axis::pointwise(1), Axis::pointwise(height.read * width.read)],
            false => [height, width],
        })
    }

    /// The image of a pixel of the result, and where it is there.
    #[inline(always)]
    pub(crate) fn pixel(&self, number: usize) -> (usize, [usize; 3]) {
        let [_, height, width] = self.sides.map(|side| side.made);
        let row = number / width;
        let slice = row / height;
        let depth = self.sides[0].made;
        (slice / depth, [slice % depth, row % height, number % width])
    }

    /// Gives each pixel that the window of a result sees, with the number of the window's element.
    #[inline(always)]
    pub(crate) fn seen(&self, image: usize, at: [usize; 3], mut each: impl FnMut(usize, usize)) {
        let [d, h, w] = self.sides;
        for a in 0..d.kernel {
            let Some(z) = d.sees(at[0], a) else { continue };
            for b in 0..h.kernel {
                let Some(y) = h.sees(at[1], b) else { continue };
                let row = ((image * d.read + z) * h.read + y) * w.read;
                for c in 0..w.kernel {
                    if let Some(x) = w.sees(at[2], c) {
                        each(row + x, (a * h.kernel + b) * w.kernel + c);
                    }
                }
            }
        }
    }
}
