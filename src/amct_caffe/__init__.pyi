from types import ModuleType

from amct.caffe.amct_api import activation_quantize_model as activation_quantize_model
from amct.caffe.amct_api import create_quant_config as create_quant_config
from amct.caffe.amct_api import init as init
from amct.caffe.amct_api import set_cpu_mode as set_cpu_mode
from amct.caffe.amct_api import set_gpu_mode as set_gpu_mode
from amct.caffe.amct_api import weights_quantize_model as weights_quantize_model
from amct.caffe.auto_calibration import accuracy_based_auto_calibration as accuracy_based_auto_calibration
from amct.caffe.prototxt import uninplace_model as uninplace_model
from amct.caffe.ptq.convert import convert_model as convert_model
from amct.caffe.ptq.save import save_model as save_model
from amct.caffe.pycaffe.runtime import install_as_caffe as install_as_caffe
from amct.caffe.qat.amct_api import create_quant_retrain_config as create_quant_retrain_config
from amct.caffe.qat.amct_api import create_quant_retrain_model as create_quant_retrain_model
from amct.caffe.qat.amct_api import save_quant_retrain_model as save_quant_retrain_model

amct: ModuleType
__all__: list[str]
