//! Macros that both vector widths share.

/// Implements an instruction set from its name and the processor's features.
macro_rules! machine {
    ($machine:ident, $features:literal) => {
        impl Machine for $machine {
            #[inline(always)]
            unsafe fn fence() {
                // SAFETY: every x86-64 processor has the instruction.
                unsafe { _mm_sfence() }
            }
            #[inline(always)]
            unsafe fn streams<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
                store: Store,
                pass: &Pass<'_>,
            ) where
                O: Combine<V> + Combine<S>,
            {
                // SAFETY: the caller's promise, handed on.
                unsafe { streams::<V, F, S, T, O>(store, pass) }
            }
        }

        /// # Safety
        /// As for [`generic::reduce`]; the processor has these features.
        #[target_feature(enable = $features)]
        #[inline(never)]
        unsafe fn streams<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
            store: Store,
            pass: &Pass<'_>,
        ) where
            O: Combine<V> + Combine<S>,
        {
            // SAFETY: the caller's promise, handed on.
            unsafe { generic::streams::<$machine, V, F, S, T, O>(store, pass) }
        }
    };
}

/// Implements `store` and `stream` of a format with its `write`.
macro_rules! stores {
    ($block:ty) => {
        #[inline(always)]
        unsafe fn store(destination: *mut u8, block: $block) {
            // SAFETY: the caller's pointer is good for the block.
            unsafe { Self::write::<false>(destination, block) }
        }
        #[inline(always)]
        unsafe fn stream(destination: *mut u8, block: $block) {
            // SAFETY: as for `store`, and aligned.
            unsafe { Self::write::<true>(destination, block) }
        }
    };
}

/// Implements an 8-bit format with `write_bytes` and a `widen` of one line, in the order of quarters.
macro_rules! bytes {
    ($vector:ty, $read:ident, $format:ident, $kind:ty, $widen:path) => {
        impl $format {
            /// # Safety
            /// As for [`put`].
            #[inline(always)]
            unsafe fn write<const STREAM: bool>(destination: *mut u8, block: Block) {
                // SAFETY: the caller's promise.
                unsafe { write_bytes::<$kind, STREAM>(destination, block) }
            }
        }
        impl Format<$vector> for $format {
            const ELEMENT_BYTES: usize = 1;
            const WRITES_ONE_NAN: bool = true;
            type Block = Block;
            type Wide = F32;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> Block {
                // SAFETY: the caller's pointer is good for one line.
                unsafe { $widen($read(source.cast())) }
            }
            stores!(Block);
            #[inline(always)]
            unsafe fn ordered(block: Block) -> Block {
                // SAFETY: the caller has the instruction set.
                unsafe { ordered_quarters(block) }
            }
            #[inline(always)]
            unsafe fn shuffled(block: Block) -> Block {
                // SAFETY: the caller has the instruction set.
                unsafe { shuffled_quarters(block) }
            }
        }
    };
}
