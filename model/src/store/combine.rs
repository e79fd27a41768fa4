//! Combines the tensors that a compressed-tensors checkpoint has of a matrix into one.

use super::{Store, Tensor};
use crate::{
    compressed::{CODES, CompressedMatrix, ORDER, Place, SCALES, SHAPE, ZEROS},
    dtype::of_compressed,
    error::ModelError,
    warning::Warning,
};
use galaxy_common::{WeightBlock, WeightFormat};

impl Store {
    /// Puts a matrix in the place of the tensors that it stands in. Gives a warning where some are rounded by that.
    ///
    /// # Errors
    /// When the tensors of a matrix do not fit together, or are of a kind that is not read.
    pub(crate) fn combine(&mut self) -> Result<Option<Warning>, ModelError> {
        let names = self.tensors.keys().filter_map(|name| name.strip_suffix(CODES));
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.sort_unstable();
        let mut rounded = 0;
        for base in &names {
            let (matrix, exact) = self.compressed(base)?;
            rounded += usize::from(!exact);
            self.put(base, matrix)?;
        }
        let text = format!("{rounded} matrices have scales of 32 bits, which are rounded to 16");
        Ok((rounded > 0).then(|| Warning { path: self.directory.clone(), text }))
    }

    /// Adds a matrix, and forgets its tensors.
    fn put(&mut self, base: &str, matrix: CompressedMatrix) -> Result<(), ModelError> {
        let path = self.path(matrix.codes.shard).to_owned();
        for ending in [CODES, SCALES, ZEROS, SHAPE] {
            self.tensors.remove(&format!("{base}{ending}"));
        }
        let tensor = Tensor {
            shard: self.places(),
            dtype: of_compressed(matrix.format),
            shape: vec![matrix.outputs, matrix.inputs],
            offset: 0,
            bytes: matrix.bytes(),
            tile: 0,
            format: Some(matrix.format),
            paired: 0,
        };
        let name = matrix.name.clone();
        if self.tensors.insert(name.clone(), tensor).is_some() {
            return Err(ModelError::Compressed {
                path,
                tensor: name,
                problem: "stands there as a tensor too".to_owned(),
            });
        }
        self.compressed.push(matrix);
        Ok(())
    }

    /// The matrix that stands in the tensors called `base`, and whether blocks hold exactly what these say.
    fn compressed(&self, base: &str) -> Result<(CompressedMatrix, bool), ModelError> {
        let name = format!("{base}.weight");
        let codes = &self.tensors[&format!("{base}{CODES}")];
        let wrong = |problem: String| ModelError::Compressed {
            path: self.path(codes.shard).to_owned(),
            tensor: name.clone(),
            problem,
        };
        let part = |ending: &str| self.tensors.get(&format!("{base}{ending}"));
        let needed =
            |ending: &str| part(ending).ok_or_else(|| wrong(format!("has no {base}{ending}")));
        if part(ORDER).is_some() {
            let problem = "has its columns in groups of another order (actorder = \"group\"), \
                           which is not read: quantise it with actorder = \"weight\" or without";
            return Err(wrong(problem.to_owned()));
        }
        let [outputs, inputs] = self
            .numbers(needed(SHAPE)?)?
            .ok_or_else(|| wrong(format!("{base}{SHAPE} does not hold two numbers of 64 bits")))?;
        let (packed, scales, zeros) = (side(codes), needed(SCALES)?, part(ZEROS));
        let ([height, words], [rows, groups]) = (packed, side(scales));
        if codes.dtype != "I32" || height != outputs || outputs == 0 || inputs == 0 {
            let problem = format!(
                "its codes are {} values of shape {packed:?}, for {outputs} outputs and {inputs} inputs",
                codes.dtype
            );
            return Err(wrong(problem));
        }
        let bits = words.saturating_mul(32) / inputs;
        let format = CompressedMatrix::format(bits, zeros.is_some());
        let whole = inputs.is_multiple_of(WeightBlock::GROUP.into())
            && Some(words) == (inputs / 8).checked_mul(bits).map(|bytes| bytes / 4);
        let (Some(format), true) = (format, whole) else {
            let problem = format!(
                "it has {words} words of 32 bits for {inputs} inputs{}: codes of 4 bits, and of 8 bits without \
                 zero points, are read, where the number of inputs is a multiple of 32",
                if zeros.is_some() { " and zero points" } else { "" }
            );
            return Err(wrong(problem));
        };
        let group = inputs.checked_div(groups).unwrap_or(0);
        let grouped = group > 0
            && group.is_multiple_of(WeightBlock::GROUP.into())
            && Some(inputs) == group.checked_mul(groups);
        let scale = scales.format.filter(|format| format.block().is_none());
        let (Some(scale), true) = (scale, grouped && rows == outputs) else {
            let problem = format!(
                "its scales are {} values of shape {:?}, for {outputs} outputs and {inputs} inputs: groups of a \
                 multiple of 32 inputs are read",
                scales.dtype, scales.shape
            );
            return Err(wrong(problem));
        };
        if let Some(zeros) = zeros
            && (zeros.dtype != "I32" || side(zeros) != [outputs.div_ceil(8), groups])
        {
            let problem =
                format!("its zero points are {} values of shape {:?}", zeros.dtype, zeros.shape);
            return Err(wrong(problem));
        }
        let place = |of: &Tensor| Place { shard: of.shard, offset: of.offset };
        let matrix = CompressedMatrix {
            outputs,
            inputs,
            format,
            codes: place(codes),
            scales: place(scales),
            scale,
            zeros: zeros.map(place),
            group,
            name: name.clone(),
        };
        Ok((matrix, scale != WeightFormat::F32))
    }

    /// The two whole numbers that a tensor holds, if that is what it holds.
    fn numbers(&self, tensor: &Tensor) -> Result<Option<[u64; 2]>, ModelError> {
        if tensor.dtype != "I64" || tensor.bytes != 16 {
            return Ok(None);
        }
        let mut bytes = [0; 16];
        self.read_raw(tensor.shard, &mut bytes, tensor.offset)?;
        let number = |at: usize| bytes[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        Ok(Some([number(0), number(8)]))
    }
}

/// The two sides of a matrix; zeros for a tensor of another number of sides.
fn side(tensor: &Tensor) -> [u64; 2] {
    tensor.shape.as_slice().try_into().unwrap_or_default()
}
