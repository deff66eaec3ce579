//! Floating-point environment of a pass: the default one, whatever the calling thread has set.
//!
//! Flush-to-zero, denormals-are-zero and the rounding mode are state of a thread. Any thread of a process may
//! run a pass (a waiting caller or the engine's thread), so a pass that used the thread's environment would
//! return bits that depend on the thread that ran it.

/// Sets the default environment and restores the thread's previous one when it is dropped.
#[derive(Debug)]
pub(crate) struct Environment {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    before: Option<machine::Word>,
}

impl Environment {
    /// Sets the default environment if the thread has another one.
    #[inline]
    pub(crate) fn standard() -> Self {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        {
            let current = machine::read();
            let differs = current & machine::CONTROL != machine::STANDARD & machine::CONTROL;
            if differs {
                machine::write(machine::STANDARD);
            }
            Self { before: differs.then_some(current) }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        Self {}
    }
}

impl Drop for Environment {
    #[inline]
    fn drop(&mut self) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if let Some(before) = self.before {
            machine::write(before);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod machine {
    use std::arch::asm;

    pub(crate) type Word = u32;
    /// MXCSR: all exceptions masked, round to nearest even, subnormals kept.
    pub(crate) const STANDARD: Word = 0x1f80;
    /// All bits but the six sticky flags.
    pub(crate) const CONTROL: Word = 0xffc0;

    #[inline]
    pub(crate) fn read() -> Word {
        let mut word: Word = 0;
        // SAFETY: stores MXCSR into `word`, a local variable. SSE is part of x86-64.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    /// The compiler does not move arithmetic across: kernels load operands from memory and store results there,
    /// and the compiler must assume that the assembly reads and writes memory.
    #[inline]
    pub(crate) fn write(word: Word) {
        // SAFETY: loads MXCSR with a value read from the processor, or with the default one: no reserved bit is
        // set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) mod machine {
    use std::arch::asm;

    pub(crate) type Word = u64;
    /// FPCR: round to nearest even, subnormals kept, no traps.
    pub(crate) const STANDARD: Word = 0;
    /// AH, FIZ, FZ16, RMode, FZ, DN and the trap bits.
    pub(crate) const CONTROL: Word = 0x07ff_9f07;

    #[inline]
    pub(crate) fn read() -> Word {
        let word: Word;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags)) };
        word
    }

    /// As for x86-64.
    #[inline]
    pub(crate) fn write(word: Word) {
        // SAFETY: writes a value read from the processor, or the default one.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::machine::{read, write};
    use crate::arch::Isa;
    use crate::{Dtype, Op, Pass, Store, Width};

    fn sum(isa: Isa, inputs: [f32; 2]) -> u32 {
        let (left, right) = ([inputs[0]; 33], [inputs[1]; 33]);
        let mut output = [0_f32; 33];
        let pass = Pass {
            dtype: Dtype::F32,
            op: Op::Sum,
            inputs: &[left.as_ptr().cast(), right.as_ptr().cast()],
            wide: &[],
            output: output.as_mut_ptr().cast(),
            to: Width::Narrow,
            numel: 33,
            divisor: 3,
        };
        // SAFETY: all three hold 33 elements.
        unsafe { pass.run_with(isa, Store::Cached).unwrap() };
        assert!(output.iter().all(|value| value.to_bits() == output[0].to_bits()));
        output[0].to_bits()
    }

    #[test]
    fn bits_do_not_depend_on_the_environment_of_the_thread() {
        let usual = read();
        let inputs = [[1e-40, 2e-40], [1.0, 1e-9], [-1.0, 3e-8], [f32::MAX, 1e-30]];
        for isa in Isa::ALL {
            for values in inputs {
                let expected = sum(isa, values);
                // Flush to zero, denormals are zero, the three other rounding modes, and all together.
                for bits in [0x8000, 0x0040, 0x2000, 0x4000, 0x6000, 0xe040] {
                    write(0x1f80 | bits);
                    let actual = sum(isa, values);
                    let after = read();
                    write(usual);
                    assert_eq!(actual, expected, "{} {values:?} {bits:#x}", isa.name());
                    assert_eq!(after & 0xffc0, 0x1f80 | bits, "the thread keeps its own");
                }
            }
        }
    }
}
