//! The machine that an experiment ran on.

use anyhow::{Context, Result};
use galaxy_common::Bytes;
use serde::{Deserialize, Serialize};

/// A machine, as it describes itself.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// The kind of processor.
    pub processor: String,
    /// The number of cores.
    pub cores: usize,
    /// The memory of the whole machine.
    pub memory: Bytes,
    /// The release of the operating system's kernel.
    pub kernel: String,
    /// The features of the processor that the speed of our kernels depends on, and whether the machine is
    /// virtual.
    pub features: Vec<String>,
}

impl Machine {
    /// The machine that this process runs on.
    ///
    /// # Errors
    /// Without `/proc`.
    pub fn read() -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).with_context(|| path.to_owned());
        let board = std::fs::read_to_string("/proc/device-tree/model").unwrap_or_default();
        Self::parse(
            &read("/proc/cpuinfo")?,
            &read("/proc/meminfo")?,
            read("/proc/sys/kernel/osrelease")?.trim(),
            board.trim_matches(['\0', '\n']),
        )
    }

    fn parse(cpuinfo: &str, meminfo: &str, kernel: &str, board: &str) -> Result<Self> {
        let value = |text: &str, key: &str| {
            let pairs = text.lines().filter_map(|line| line.split_once(':'));
            let mut found = pairs.filter(|(name, _)| name.trim() == key);
            found.next().map(|(_, value)| value.trim().to_owned())
        };
        let memory = value(meminfo, "MemTotal").context("/proc/meminfo has no MemTotal")?;
        let kilobytes: u64 = memory.trim_end_matches(" kB").parse()?;
        let flags = value(cpuinfo, "flags").or(value(cpuinfo, "Features")).unwrap_or_default();
        let of_note = |f: &&str| {
            ["avx", "fma", "asimd", "sve", "bf16", "i8mm"].iter().any(|start| f.starts_with(start))
                || *f == "hypervisor"
        };
        let named = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let processor = value(cpuinfo, "model name").or(named(board));
        Ok(Self {
            processor: processor.unwrap_or_else(|| "unknown".to_owned()),
            cores: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
            memory: Bytes(kilobytes * 1024),
            kernel: kernel.to_owned(),
            features: flags.split_whitespace().filter(of_note).map(str::to_owned).collect(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn processor_cores_memory_and_features_are_parsed_on_x86_and_arm() {
        let x86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 fma hypervisor\n\n\
                   processor\t: 1\nmodel name\t: AMD EPYC\n";
        let machine = Machine::parse(x86, "MemTotal:  1000 kB\n", "6.18", "").unwrap();
        assert_eq!((machine.processor.as_str(), machine.cores), ("AMD EPYC", 2));
        assert_eq!(machine.memory, Bytes(1_024_000));
        assert_eq!(machine.features, ["avx2", "fma", "hypervisor"]);
        let arm = "processor : 0\nFeatures : fp asimd\n";
        let machine = Machine::parse(arm, "MemTotal: 1 kB\n", "6.1", "Raspberry Pi 4").unwrap();
        assert_eq!((machine.processor.as_str(), machine.cores), ("Raspberry Pi 4", 1));
        assert_eq!(machine.features, ["asimd"]);
    }
}
